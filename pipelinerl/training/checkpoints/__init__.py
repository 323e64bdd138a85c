"""Atomic checkpoints, their remote copies, fencing between trainers, and retention."""
