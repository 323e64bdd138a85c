"""Named append-only logs between the roles: Redis Streams, an in-memory equivalent, and the record formats."""
