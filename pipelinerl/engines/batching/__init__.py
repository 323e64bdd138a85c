"""Continuous batching without any array library: sequences, the scheduler, the loop that decodes."""
