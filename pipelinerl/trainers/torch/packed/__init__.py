"""Packing of many rollouts into one row: shared prefixes are computed once, and attention keeps rollouts apart."""
