"""The strong tier: each run in a sandbox of gVisor's, whose kernel is not the host's."""
