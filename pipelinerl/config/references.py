"""References to users' files in a recipe's table, made absolute: each is relative to the file that says it.

So the resolved recipe, which roles and a resumed run read from the run's directory, names files wherever that lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pipelinerl.system.references import anchored

#: Keys whose value names a part of the run, at any depth.
_NAME_A_PART: Final = frozenset({"type", "source", "verifier", "function", "filter"})
#: Tables that belong to a part, which alone knows what their keys mean.
_OF_A_PART: Final = frozenset({"parameters", "options"})


def anchor(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The table with `path.py:attribute` made absolute, relative paths being meant from `folder`."""
    return {key: _anchored(key, value, folder) for key, value in table.items()}


def _anchored(key: str, value: Any, folder: Path) -> Any:
    if key in _OF_A_PART:
        return value
    if isinstance(value, Mapping):
        return anchor(value, folder)
    if isinstance(value, list):
        return [_anchored(key, item, folder) for item in value]
    return anchored(value, folder) if key in _NAME_A_PART and isinstance(value, str) else value
