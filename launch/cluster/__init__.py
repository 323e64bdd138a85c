"""Runs on several hosts: one supervisor per host (`node`), led by the head, and launchers that start the nodes.

Slurm, Kubernetes and Ray add no rules of their own: each starts `pipelinerl node` on every host, and stops it.
"""
