"""The commands of the command line, one file or folder each. Commands that start a process of a run are in `roles/`."""
