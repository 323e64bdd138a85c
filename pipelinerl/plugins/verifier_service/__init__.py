"""Verifiers as a separate service: its wire format, its server, and the client by which actors use it."""
