"""Questions put to a model outside a run: `pipelinerl eval` and `pipelinerl prefilter`, on any engine or server."""
