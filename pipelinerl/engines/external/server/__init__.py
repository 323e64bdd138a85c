"""Inference servers that somebody runs, used as they are, behind the contract."""
