"""What the controller decides: pure functions and classes over its state."""
