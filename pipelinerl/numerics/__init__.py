"""Log-probs, and comparisons of two sets of them: pure functions."""
