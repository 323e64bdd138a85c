"""The torch trainer: any Hugging Face causal language model, or its value head."""
