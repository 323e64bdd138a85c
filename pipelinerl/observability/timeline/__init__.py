"""A run over time: what each of its parts did when, to be drawn and to be traced."""
