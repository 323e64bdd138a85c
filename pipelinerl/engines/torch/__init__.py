"""The torch engine: any Hugging Face causal language model directory, on CPU or CUDA."""
