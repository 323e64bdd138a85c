"""The controller's state, its inputs and its effects: plain values, without decisions or input/output."""
