"""Evaluation of a model outside a run, on any engine or server: `pipelinerl eval` and `pipelinerl prefilter`."""
