"""JAX: engine and trainer for Llama-family decoders on TPUs and any other device that XLA supports."""
