"""Weights put on servers by the trainer, from which each engine fetches on its own (RLAX §3.2)."""
