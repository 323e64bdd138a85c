"""Tokens of many rollouts in one row: what is computed once, and how attention keeps rollouts apart."""
