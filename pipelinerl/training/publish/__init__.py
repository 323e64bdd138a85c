"""Publication of weights, the canary check of engines, and the weights of earlier versions."""
