"""A run on several hosts: what the plan says of each, the supervisor of one (`node`), and what starts these elsewhere.

Slurm, Kubernetes and Ray have no rules of their own: each starts `pipelinerl node` on every host, and ends it.
"""
