"""Mixture-of-experts support of the torch trainer: autocast for experts, and expert parallelism."""
