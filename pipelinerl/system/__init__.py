"""Operating-system helpers for all processes: HTTP services, addresses, storage, threads. Independent of RL."""
