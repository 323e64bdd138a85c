"""The strong tier: each run in its own gVisor sandbox, whose kernel is not the host's."""
