"""Secrets from environment variables: a process of a run reads them, and the programs that it starts do not get them.

An agent's program or a reward function may run what the trained model wrote, so it must not find the run's token, the
stream server's password or a judge's key among its variables. A role calls `withhold` before it starts any program.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

#: Prefix of the project's own variables, all of which are withheld.
_OWN: Final = "PIPELINERL_"

_withheld: dict[str, str] = {}


def withhold(names: Iterable[str] = ()) -> None:
    """Remove the project's own variables, and those with these names, from the environment of later child processes."""
    for name in {*names, *(name for name in os.environ if name.startswith(_OWN))}:
        if (value := os.environ.pop(name, None)) is not None:
            _withheld[name] = value


def read_secret(name: str) -> str | None:
    """Return the value of an environment variable, withheld or not; None if it is not set."""
    return os.environ.get(name, _withheld.get(name))
