"""Weights pushed to every engine at once, through a process group that the trainer leads."""
