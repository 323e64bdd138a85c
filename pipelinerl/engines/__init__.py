"""Inference servers that satisfy the inference contract, and the client and pool that actors use to reach them."""
