"""The actor: it claims orders (requests for groups), has engines sample and verifiers judge, and appends the groups."""
