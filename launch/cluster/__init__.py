"""Runs on several hosts: one supervisor per host (`node`), led by the head, and launchers that start the nodes.

The launchers for Slurm, Kubernetes and Ray only start `pipelinerl node` on every host, and stop it; how nodes behave
does not depend on them.
"""
