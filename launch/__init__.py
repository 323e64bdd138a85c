"""Start the processes of a run and keep them alive.

A run on one machine starts all of them; in a run on several hosts, each host starts its own (`launch.cluster`).

`plan` defines the processes (pure), `placement` assigns hosts and devices to them (pure), `supervisor` runs them. The
launcher imports the descriptions of roles, the configuration and observability, but no code that a role runs, so it
starts quickly and stays small.
"""
