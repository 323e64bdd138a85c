"""`pipelinerl oubliette`: the sandbox of this machine, on the command line."""
