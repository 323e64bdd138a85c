"""Operating-system helpers for all processes, independent of RL: HTTP services, addresses, storage, threads."""
