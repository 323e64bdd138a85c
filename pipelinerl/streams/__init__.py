"""Append-only logs by name between the roles: Redis Streams, an in-memory twin, and the records they carry."""
