"""The trainer contract: the interface between the training loop and a training backend. Needs only numpy."""
