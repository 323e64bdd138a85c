"""Composition roots: one file per process of a run, where parts that do not know each other are joined."""
