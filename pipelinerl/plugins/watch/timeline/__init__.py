"""The timeline of a run: what each process did and when, for the live page and for traces."""
