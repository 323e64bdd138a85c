"""The weight-group endpoint of an engine whose device belongs to worker processes."""
