"""The torch trainer: any Hugging Face causal language model, as a policy or, with a value head, as a critic."""
