"""Verifiers as a service of their own: its wire, its server, and the client that actors judge by."""
