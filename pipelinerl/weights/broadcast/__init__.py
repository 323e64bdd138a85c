"""Broadcast of weights to all engines at once, through a process group that the trainer leads."""
