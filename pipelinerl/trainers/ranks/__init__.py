"""Multi-process trainers, for any array library: the training loop calls rank 0, which sends commands to the others."""
