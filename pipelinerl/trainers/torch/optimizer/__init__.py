"""The torch trainer's optimizer and the placement of its state."""
