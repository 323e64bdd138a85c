"""`pipelinerl explain`: the objective of a recipe as an expression, evaluated on recorded rollouts."""
