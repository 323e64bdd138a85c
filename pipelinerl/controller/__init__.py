"""The only process of a run that decides: it issues and accounts for prompts, bounds staleness, gives directives."""
