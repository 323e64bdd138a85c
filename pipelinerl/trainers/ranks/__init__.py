"""Multi-process trainers for every array library: rank 0 is called by the training loop and commands other ranks."""
