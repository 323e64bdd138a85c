"""Data for the live page of a run, read only from the run's files, in bounded memory; `plugins/watch` serves it."""
