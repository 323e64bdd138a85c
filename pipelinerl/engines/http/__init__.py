"""The inference contract over HTTP: the server in front of an engine, and the client and pool that actors use."""
