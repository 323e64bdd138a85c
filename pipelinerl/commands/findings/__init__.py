"""Findings of `pipelinerl check`, one file per larger topic."""
