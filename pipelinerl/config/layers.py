"""Layers of a recipe, from bottom to top: its base, the recipe's own keys, and overrides on the command line.

A layer changes single keys of the layers below. There are two exceptions: a layer that names the objective's preset
replaces the objective of all lower layers, and a layer that names the `kind` of one of the objective's slots replaces
that slot. The layer's other keys then refine the new preset or slot, in any order.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pipelinerl.errors import RecipeError
from pipelinerl.observability.logs import without_secrets

Path = tuple[str, ...]

_OBJECTIVE: Final = "objective"
_PRESET: Final = "preset"


def merged(below: Mapping[str, Any], layer: Mapping[str, Any], path: Path = ()) -> dict[str, Any]:
    """Return the tables `below` with a higher layer merged into them."""
    result = dict(below)
    for key, value in layer.items():
        here = (*path, key)
        old, new = _as_table(result.get(key), here), _as_table(value, here) if _selector(here) else value
        chosen = isinstance(new, dict) and _selector(here) in new
        both_tables = isinstance(old, dict) and isinstance(new, dict)
        result[key] = merged(old, new, here) if both_tables and not chosen else value
    return result


def overridden(table: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply `section.key=value` overrides as one layer; a later value of the same key replaces an earlier one.

    A table in a list is identified by its name: `domains.math.max_tokens=64`.

    Raises:
        RecipeError: an override is malformed, contains a password, or its path passes through a value that is not a
            table.
    """
    changes = [_parsed(override) for override in overrides]
    result = _copied(table)
    for path, _ in changes:
        if path[-1] == _selector(path[:-1]):
            _forget(result, path[:-1])
    for path, value in changes:
        _put(result, path, value)
    return result


def _selector(path: Path) -> str | None:
    """Return the key whose value replaces a whole table: `preset` for the objective, `kind` for one of its slots."""
    if path == (_OBJECTIVE,):
        return _PRESET
    return "kind" if len(path) == 2 and path[0] == _OBJECTIVE and path[1] != _PRESET else None


def _as_table(value: Any, path: Path) -> Any:
    """If the recipe gives only the name of a preset or kind, expand it to a table with this name."""
    selector = _selector(path)
    return {selector: value} if selector and isinstance(value, str) else value


def _parsed(override: str) -> tuple[Path, Any]:
    path, separator, text = override.partition("=")
    if not separator or not path.strip():
        raise RecipeError(f"an override must read section.key=value, got {without_secrets(override)!r}")
    if text != without_secrets(text):
        raise RecipeError(
            f"{path.strip()}: a password must not be in a command line, which every user of this machine can read; "
            "write the address into the recipe's file, or, for roles started one by one, into $PIPELINERL_REDIS_URL"
        )
    keys, value = tuple(path.strip().split(".")), _literal(text.strip())
    selector = _selector(keys)
    return ((*keys, selector), value) if selector and isinstance(value, str) else (keys, value)


def _literal(text: str) -> Any:
    """Parse a TOML value. Other text is returned as it is, so that strings need no quotes within the shell's quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _forget(table: dict[str, Any], path: Path) -> None:
    """Remove the value at this path, if there is one."""
    node: Any = table
    for key in path[:-1]:
        node = node.get(key) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(path[-1], None)


def _put(table: dict[str, Any], path: Path, value: Any) -> None:
    node: Any = table
    for depth, section in enumerate(path[:-1], start=1):
        if isinstance(node, list):
            child = _named(node, path, depth)
        else:
            child = node[section] = _as_table(node.get(section, {}), path[:depth])
        if not isinstance(child, dict) and not (depth < len(path) - 1 and _are_tables(child)):
            what = "a list of tables: name one, and a key of it" if _are_tables(child) else "not a table"
            raise RecipeError(f"{'.'.join(path)}: {section} is {what}")
        node = child
    node[path[-1]] = value


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _named(tables: list[dict[str, Any]], path: Path, depth: int) -> dict[str, Any]:
    """Return the table of a list, such as `[[domains]]`, whose name the path contains."""
    wanted = path[depth - 1]
    found = next((table for table in tables if table.get("name") == wanted), None)
    if found is None:
        there = ", ".join(str(table.get("name")) for table in tables)
        raise RecipeError(
            f"{'.'.join(path)}: none of {'.'.join(path[: depth - 1])} is called {wanted}; there are {there}"
        )
    return found
