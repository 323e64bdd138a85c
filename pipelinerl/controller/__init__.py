"""The controller, the only process of a run that decides: it issues prompts, bounds staleness, directs the trainer."""
