"""Adapters that put the contract in front of unmodified inference servers, which the user runs."""
