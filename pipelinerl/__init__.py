"""Asynchronous streaming RL post-training with in-flight weight updates.

docs/understand/architecture.md describes the packages. Imports only go down; `tests/architecture` checks this.
"""

__version__ = "0.1.0"
