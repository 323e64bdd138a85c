"""The loop around a trainer: admits rollouts, packs them, steps, publishes, checkpoints, each once."""
