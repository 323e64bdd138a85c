"""One file per command of the command line that is no process of a run."""
