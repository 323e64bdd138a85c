"""Unmodified inference servers that the user runs, behind the contract."""
