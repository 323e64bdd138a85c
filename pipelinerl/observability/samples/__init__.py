"""Readable samples: a few answers of every step, in size-limited files in the run's directory."""
