"""The JAX engine: Llama-family model directories, on any device that XLA supports."""
