"""Model directories: checkpoints, tokenizers, and the models of debug size that ship with the package."""
