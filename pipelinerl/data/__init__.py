"""Where problems come from and which comes next: problem i of a run is a pure function of seed, mixture and i."""
