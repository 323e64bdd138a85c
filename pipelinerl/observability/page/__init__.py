"""Data for the live page of a run, read only from the run's files, in bounded memory; `commands/watch` serves it."""
