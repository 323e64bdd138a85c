"""Start the processes of a run and keep them alive.

In a run on one machine, the launcher starts all processes. In a run on several hosts, each host has a launcher, which
starts the processes of that host (`launch.cluster`).

`plan` defines the processes (pure), `placement` assigns hosts and devices to them (pure), `supervisor` runs them. The
launcher imports the descriptions of roles, the configuration and observability, but no code that a role runs, so it
starts quickly and stays small.
"""
