"""The trainer of the numpy bigram model, with closed-form gradients."""
