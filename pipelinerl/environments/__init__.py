"""Environments: users' programs that talk to the model through the gateway, which forwards requests to an engine."""
