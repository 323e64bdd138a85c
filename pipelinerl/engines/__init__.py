"""Inference servers that satisfy the inference contract, and the client and pool by which actors use them."""
