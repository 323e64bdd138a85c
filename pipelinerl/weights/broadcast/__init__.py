"""Broadcast of weights to all engines together, through a process group that the trainer leads."""
