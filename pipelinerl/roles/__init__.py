"""One file per kind of process (role), which builds the process from components (a composition root)."""
