"""`pipelinerl simulate`: what a recipe would do on given hardware, and which of its knobs are worth turning."""
