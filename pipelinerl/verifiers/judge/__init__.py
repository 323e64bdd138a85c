"""A language model as judge: its prompt, the parsing of its reply, and its budget."""
