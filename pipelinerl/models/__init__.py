"""Model directories: checkpoints, tokenizers, and the tiny debug models that ship with the package."""
