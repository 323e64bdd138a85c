"""What the live page shows of a run: read from its files alone, in bounded memory. The server is `commands/watch`."""
