"""Environments: the other side of a conversation. A user's program asks the gateway, which asks an engine."""
