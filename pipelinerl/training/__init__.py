"""The loop around a trainer: it admits and packs rollouts, takes steps, publishes weights and writes checkpoints."""
