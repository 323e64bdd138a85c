"""Asynchronous streaming RL post-training with in-flight weight updates.

Rooms, from the floor up: values (`types`, `arrays`, `staleness`, `rng`, `errors`), `objective`, `numerics`, `data`,
`streams`, `verifiers`, `models`, `weights`, `engines`, `trainers`, `actor`, `training`, `controller`, `roles`.
Imports go down only; `tests/architecture` guards it.
"""

__version__ = "0.1.0"
