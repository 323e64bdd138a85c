"""Runs on several hosts: each host has a node, which supervises the host's processes; the first host's node leads.

The launchers for Slurm, Kubernetes and Ray only start and stop `pipelinerl node` on every host. The nodes behave the
same under every launcher.
"""
