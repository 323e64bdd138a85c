"""Instructions whose following a program can check: what they ask, how they are read from data, how they are scored."""
