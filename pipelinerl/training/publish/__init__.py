"""Weights on their way out: publication, the canary check of engines, the weights of earlier versions."""
