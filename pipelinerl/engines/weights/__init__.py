"""An engine's side of a weight update, whatever computes with the weights afterwards."""
