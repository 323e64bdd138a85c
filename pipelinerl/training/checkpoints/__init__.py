"""Checkpoints: one atomic unit each, their copies, who may write them, which stay."""
