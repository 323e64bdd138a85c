"""One optimizer step: forward passes, gradient, checks, figures."""
