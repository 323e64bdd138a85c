"""`pipelinerl replay`: repeat a recorded training step and compare the results."""
