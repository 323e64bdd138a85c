"""A service that compiles, runs and checks programs in the sandbox of another machine, and its client."""
