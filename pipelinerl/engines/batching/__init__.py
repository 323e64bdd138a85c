"""Continuous batching without an array library: sequences, the scheduler and the decode loop."""
