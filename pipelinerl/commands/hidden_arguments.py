"""`hide_password`: a password on a role's command line is in every user's process list; in the environment it is not.

A role that is given one that way starts itself again at once, as the same process, with the address in
`$PIPELINERL_REDIS_URL`. Until then, some tenths of a second, and in the shell's history, it is seen all the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from pipelinerl.observability.redaction import without_secrets

_OPTION: Final = "--redis-url"
_VARIABLE: Final = "PIPELINERL_REDIS_URL"


def hide_password() -> None:
    """Replace this process by one whose arguments hold no password, if its own do; else return."""
    moved = without_password(sys.orig_argv, os.environ)
    if moved is not None:
        arguments, environment = moved
        os.execve(sys.executable, [sys.executable, *arguments[1:]], dict(environment))


def without_password(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]] | None:
    """Arguments and environment that say the same, with the address where nobody sees it; None for harmless ones."""
    kept, address, rest = list[str](), "", iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name == _OPTION:
            value = value if equals else next(rest, "")
            if value != without_secrets(value):
                address = value
                continue
            kept += [argument] if equals else [argument, value]
        else:
            kept.append(argument)
    return (kept, {**environment, _VARIABLE: address}) if address else None
