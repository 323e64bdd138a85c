"""Composition roots: one file per kind of process, which builds the process from parts that do not import each
other.
"""
