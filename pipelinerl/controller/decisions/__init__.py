"""The controller's decisions: pure functions and classes over its state."""
