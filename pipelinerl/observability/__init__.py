"""Observability of a run: events, logs, status, live progress and report. Imports no other package of pipelinerl."""
