"""Sources of problems, and their mixture: problem i of a run is a pure function of seed, mixture and i."""
