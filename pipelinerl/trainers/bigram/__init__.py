"""The trainer of the numpy bigram model, every gradient in closed form."""
