"""Experiment trackers (TensorBoard, W&B, trackio), fed from a run's events by a separate process."""
