"""A mixture's experts in the torch trainer: in which dtype they multiply, and which process computes them."""
