"""Engines whose samples are made in another process: vLLM's core, or a server that somebody runs."""
