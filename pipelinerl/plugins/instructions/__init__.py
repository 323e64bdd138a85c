"""Instructions that a program can verify: their wording in prompts, their parsing from data sets, and their scoring."""
