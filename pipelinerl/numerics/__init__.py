"""Log-probs, and statistics that compare two sets of log-probs of the same tokens. Mostly pure functions."""
