"""Samples that one can read: a few answers of every step, in files of a bounded size in the run's directory."""
