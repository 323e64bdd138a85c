"""The torch engine, which serves any Hugging Face causal language model directory on CPU or CUDA."""
