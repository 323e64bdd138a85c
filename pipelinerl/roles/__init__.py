"""Composition roots: one file per kind of process, which builds the process from independent parts."""
