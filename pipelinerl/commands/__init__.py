"""One file or folder per command of the command line, except for the processes of a run."""
