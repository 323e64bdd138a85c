"""Discrete-event simulation of a run on given hardware: its engines, trainer, updates and pacing. Pure."""
