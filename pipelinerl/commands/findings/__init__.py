"""Findings, the lines that `pipelinerl check` prints about a recipe; one file per larger topic."""
