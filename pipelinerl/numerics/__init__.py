"""Log-probs and how far apart two sets of them are: pure functions."""
