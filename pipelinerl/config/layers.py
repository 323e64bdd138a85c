"""Layers of a recipe, from bottom to top: its base, the recipe's own keys, and overrides on the command line.

Paths in a layer are relative to its file (`resolved_beside`). The resolved recipe, which roles and resumed runs read
from the run's directory, contains absolute paths only, so it means the same wherever it is saved.

A layer changes single keys of the layers below. There are two exceptions: a layer that names the objective's preset
replaces the objective of all lower layers, and a layer that names the `kind` of one of the objective's slots replaces
that slot. The layer's other keys then refine the new preset or slot, in any order.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from pipelinerl.errors import RecipeError
from pipelinerl.observability.logs import without_secrets
from pipelinerl.system.files import from_home
from pipelinerl.system.references import anchored

KeyPath = tuple[str, ...]

_OBJECTIVE: Final = "objective"
_PRESET: Final = "preset"


def merged(below: Mapping[str, Any], layer: Mapping[str, Any], path: KeyPath = ()) -> dict[str, Any]:
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


def _selector(path: KeyPath) -> str | None:
    """Return the key whose value replaces a whole table: `preset` for the objective, `kind` for one of its slots."""
    if path == (_OBJECTIVE,):
        return _PRESET
    return "kind" if len(path) == 2 and path[0] == _OBJECTIVE and path[1] != _PRESET else None


def _as_table(value: Any, path: KeyPath) -> Any:
    """If the recipe gives only the name of a preset or kind, expand it to a table with this name."""
    selector = _selector(path)
    return {selector: value} if selector and isinstance(value, str) else value


def _parsed(override: str) -> tuple[KeyPath, Any]:
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


def _forget(table: dict[str, Any], path: KeyPath) -> None:
    """Remove the value at this path, if there is one."""
    node: Any = table
    for key in path[:-1]:
        node = node.get(key) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(path[-1], None)


def _put(table: dict[str, Any], path: KeyPath, value: Any) -> None:
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


def _named(tables: list[dict[str, Any]], path: KeyPath, depth: int) -> dict[str, Any]:
    """Return the table of a list, such as `[[domains]]`, whose name the path contains."""
    wanted = path[depth - 1]
    found = next((table for table in tables if table.get("name") == wanted), None)
    if found is None:
        there = ", ".join(str(table.get("name")) for table in tables)
        raise RecipeError(
            f"{'.'.join(path)}: none of {'.'.join(path[: depth - 1])} is called {wanted}; there are {there}"
        )
    return found


#: Keys whose value names a component: a registered name, or a reference to user code; at any depth.
_NAME_A_PART: Final = frozenset({"type", "source", "verifier", "function", "filter", "environment"})
#: Tables of component settings, whose keys only the component understands. The only paths that are resolved in such
#: tables are those of the source `files`.
_OF_A_PART: Final = frozenset({"parameters", "options", "environment_options"})
_FILES: Final = "files"
#: Options of `verifiers:` environments that are paths.
_PATHS_OF_TASKSETS: Final = frozenset({"python", "path"})
_PATHS: Final = frozenset({"path", "validation_path", "held_out_path"})


def resolved_beside(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the table with paths relative to `folder` made absolute; absolute paths stay unchanged.

    Raises:
        RecipeError: a few-shot file is missing, or does not contain messages.
    """
    resolved = _with_references(table, folder)
    elastic = resolved.get("elastic")
    if isinstance(elastic, dict) and isinstance(elastic.get("types"), dict):  # its keys are component names
        types = {anchored(type, folder): limits for type, limits in elastic["types"].items()}
        resolved["elastic"] = {**elastic, "types": types}
    domains = resolved.get("domains")
    if isinstance(domains, list):
        resolved["domains"] = [_with_files(domain, folder) for domain in domains]
    return resolved


def _with_references(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    return {key: _referenced(key, value, folder) for key, value in table.items()}


def _referenced(key: str, value: Any, folder: Path) -> Any:
    """Make references `path.py:attribute` absolute wherever a component is named."""
    if key in _OF_A_PART:
        return value
    if isinstance(value, Mapping):
        return _with_references(value, folder)
    if isinstance(value, list):
        return [_referenced(key, item, folder) for item in value]
    return anchored(value, folder) if key in _NAME_A_PART and isinstance(value, str) else value


def _with_files(domain: Any, folder: Path) -> Any:
    """Make the data paths of a domain and the files in its command absolute, and read its few-shot file.

    Values of a wrong type are left unchanged, for validation to report.
    """
    if not isinstance(domain, dict):
        return domain
    made, parameters = dict(domain), domain.get("parameters")
    if domain.get("source") == _FILES and isinstance(parameters, dict):
        made["parameters"] = {
            key: _absolute(value, folder) if key in _PATHS else value for key, value in parameters.items()
        }
    if isinstance(options := domain.get("environment_options"), dict):
        made["environment_options"] = {
            key: _absolute(value, folder) if key in _PATHS_OF_TASKSETS else value for key, value in options.items()
        }
    if isinstance(domain.get("command"), list):
        made["command"] = [_file_of_command(part, folder) for part in domain["command"]]
    if isinstance(domain.get("few_shot"), str):
        made["few_shot"] = _messages(Path(_absolute(domain["few_shot"], folder)), domain.get("name"))
    return made


def _file_of_command(part: Any, folder: Path) -> Any:
    """Make one argument of a command absolute if it names a file of `folder`; other arguments are left unchanged."""
    is_file = isinstance(part, str) and part != "" and (folder / part).is_file()
    return str(folder / part) if is_file else part


def _absolute(value: Any, folder: Path) -> Any:
    """Make a path or glob absolute, or every path of a list."""
    if isinstance(value, list):
        return [_absolute(item, folder) for item in value]
    return str(folder / from_home(value)) if isinstance(value, str) and value else value


def _messages(path: Path, domain: Any) -> Any:
    where = f"domains.{domain}.few_shot"
    try:
        messages = orjson.loads(path.read_bytes())
    except OSError as error:
        raise RecipeError(f"{where}: {path} cannot be read: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise RecipeError(f"{where}: {path} is not JSON: {error}") from None
    if not isinstance(messages, list):
        raise RecipeError(f"{where}: {path} must hold a list of messages with role and content")
    return messages
