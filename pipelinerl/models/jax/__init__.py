"""The Llama family in plain JAX: its weights from and to Hugging Face directories, and its forward pass."""
