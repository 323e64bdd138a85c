"""`pipelinerl watch`: the live page of a run, served over its files; steering goes to its controller."""
