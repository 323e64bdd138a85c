"""The commands that are one process of a run each."""
