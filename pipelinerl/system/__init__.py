"""What every process needs of its machine: HTTP services, addresses, storage, threads. Knows nothing of RL."""
