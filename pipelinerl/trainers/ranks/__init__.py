"""Multi-process trainers for every array library: rank 0 has the verbs, the other ranks execute its commands."""
