"""Users' trackers, fed from a run's events by a process of their own: TensorBoard, W&B, trackio."""
