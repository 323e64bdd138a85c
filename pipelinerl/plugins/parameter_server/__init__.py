"""Parameter servers: the trainer uploads weights, and each engine fetches them on its own (RLAX paper, §3.2)."""
