"""The weight group of an engine whose device belongs to worker processes."""
