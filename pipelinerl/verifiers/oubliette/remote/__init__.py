"""The sandbox of another machine: a service that compiles, runs and checks programs, and its client."""
