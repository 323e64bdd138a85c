"""Training backends behind the trainer contract."""
