"""What `pipelinerl check` finds, by what it looks at: a file for each that takes more than a sentence."""
