"""Asynchronous streaming RL post-training with in-flight weight updates.

Packages, from the bottom layer up: values (`types`, `arrays`, `staleness`, `rng`, `errors`), `objective`, `numerics`,
`data`, `streams`, `verifiers`, `models`, `weights`, `engines`, `trainers`, `actor`, `training`, `controller`, `roles`.
Imports only go down; `tests/architecture` checks this.
"""

__version__ = "0.1.0"
