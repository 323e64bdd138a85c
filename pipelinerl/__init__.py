"""Asynchronous streaming RL post-training with in-flight weight updates.

docs/understand/architecture.md describes the packages, which are ordered in layers. A module imports only from lower
layers; `tests/architecture` checks this.
"""

__version__ = "0.1.0"
