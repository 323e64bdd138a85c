"""Starts the processes of a run and keeps them alive. `plan` says which (pure), `local` runs them on this machine.

The launcher knows the roles by name only: it imports the configuration, the observability room and the error tree,
never a role, an engine or a trainer, so that it starts in a moment and stays small.
"""
