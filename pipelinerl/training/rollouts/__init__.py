"""Conversion of the rollout streams to the micro-batches of one step."""
