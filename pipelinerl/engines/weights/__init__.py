"""The engine's side of a weight update, for any engine."""
