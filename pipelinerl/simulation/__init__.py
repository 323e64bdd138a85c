"""Discrete-event simulation of a run on given hardware: engines, trainer, weight updates and timing. Does no I/O."""
