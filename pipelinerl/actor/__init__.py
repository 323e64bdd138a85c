"""The actor: it claims orders for prompts, has engines sample groups, has answers verified, and appends the groups."""
