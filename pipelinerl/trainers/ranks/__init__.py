"""One trainer of several processes, for every array library: rank 0 has the verbs, the others obey it."""
