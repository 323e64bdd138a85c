"""The JAX trainer: Llama-family decoders on a mesh of any devices that XLA supports."""
