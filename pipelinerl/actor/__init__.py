"""The actor: it claims prompt orders, has engines sample groups, has answers verified, and appends the groups."""
