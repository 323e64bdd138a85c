"""`pipelinerl simulate`: predicts throughput and staleness of a recipe on given hardware, and compares settings."""
