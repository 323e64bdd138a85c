"""One file per process of a run: the composition roots, where parts that do not know each other are joined."""
