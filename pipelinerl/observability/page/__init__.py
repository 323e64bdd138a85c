"""Data of the live page, read only from a run's files, in bounded memory. The server is `commands/watch`."""
