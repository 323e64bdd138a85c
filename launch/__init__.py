"""Start the processes of a run and keep them alive: on this machine, or one host's share of them (`launch.cluster`).

`plan` says which processes there are (pure), `placement` where they run (pure), `supervisor` runs them. The launcher
imports the descriptions of roles, the configuration and observability, but no code that a role runs, so it starts
quickly and stays small.
"""
