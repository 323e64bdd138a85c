"""What steps the torch trainer's parameters, and where its state lies."""
