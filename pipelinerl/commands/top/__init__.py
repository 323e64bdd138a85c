"""`pipelinerl top`: a run's figures and knobs in the terminal."""
