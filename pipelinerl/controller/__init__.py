"""The only process that makes decisions: issues prompts, accounts for each, paces by staleness, directs other roles."""
