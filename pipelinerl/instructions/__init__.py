"""Instructions that a program can verify: their prompts, their parsing from data sets, and their scoring."""
