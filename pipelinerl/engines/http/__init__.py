"""The inference contract over HTTP: the server before an engine, the client and the pool that actors use."""
