"""The JAX engine, which serves Llama-family model directories on any device that XLA supports."""
