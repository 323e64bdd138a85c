"""The identity of a role's process under test."""

from pathlib import Path
from typing import Any

from pipelinerl.config.recipe import RunConfig
from pipelinerl.roles.process import Identity


def identity_in(run_dir: Path, config: RunConfig, name: str = "role", **fields: Any) -> Identity:
    """Return the identity of a process of no run: without controller, streams and token unless `fields` name them."""
    given = {"redis_url": "", "controller_url": "", "token": None} | fields
    return Identity(config=config, run_dir=run_dir, name=name, **given)
