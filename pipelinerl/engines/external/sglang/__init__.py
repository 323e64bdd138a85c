"""SGLang: the client of a stock server's routes, and the process group that the server joins."""
