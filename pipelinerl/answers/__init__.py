"""Readers of an answer's text: its thinking, and its tool calls."""
