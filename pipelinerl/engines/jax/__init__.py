"""The JAX engine: Llama-family directories, on whatever XLA runs on."""
