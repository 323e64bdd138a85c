"""A language model as judge: what it is asked, how its answer is read, and what that may cost."""
