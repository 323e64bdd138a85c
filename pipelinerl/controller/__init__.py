"""The only active entity: issues prompts, accounts for each, paces by staleness, orders what the others do."""
