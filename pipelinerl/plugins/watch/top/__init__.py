"""`pipelinerl top`: show a run's metrics and knobs in the terminal."""
