"""`pipelinerl oubliette`: the sandbox of this machine, seen and used from the command line."""
