"""`pipelinerl watch`: the live page of a run, served from its files; changes go to its controller."""
