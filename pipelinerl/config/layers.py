"""Layers of a recipe, from bottom to top: its base, the recipe's own keys, and overrides on the command line.

Paths in a layer are relative to its file (`resolved_beside`). The resolved recipe, which roles and resumed runs read
from the run's directory, contains absolute paths only, so it means the same wherever it is saved.

A layer changes single keys of the layers below. There are three exceptions: a layer that names the objective's preset
replaces the objective of all lower layers, a layer that names the `kind` of one of the objective's slots (terms of its
formula, such as `adv`) replaces that slot, and one that names `staleness.mode` replaces j and k. The layer's other keys
then refine the new preset, slot or mode, in any order.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from pipelinerl import registry
from pipelinerl.errors import HABITS, SURROGATE, RecipeError
from pipelinerl.observability.logs import without_secrets
from pipelinerl.system.files import from_home
from pipelinerl.system.references import anchored

KeyPath = tuple[str, ...]

_OBJECTIVE: Final = "objective"
_PRESET: Final = "preset"
_MODE: Final = ("staleness", "mode")
_OF_MODE: Final = (("staleness", "j"), ("staleness", "k"))


def merged(below: Mapping[str, Any], layer: Mapping[str, Any], path: KeyPath = ()) -> dict[str, Any]:
    """Return the tables `below` with a higher layer merged into them."""
    names_mode = path == _MODE[:1] and _MODE[1] in layer
    result = {key: value for key, value in below.items() if not (names_mode and (*path, key) in _OF_MODE)}
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
        RecipeError: an override is malformed, contains a password, or its path leads through a value that is no table.
    """
    changes = [_parsed(override) for override in overrides]
    result = deepcopy(dict(table))
    for path, _ in changes:
        if path[-1] == _selector(path[:-1]):
            _forget(result, path[:-1])
        for other in _OF_MODE if path == _MODE else ():
            _forget(result, other)
    for path, value in changes:
        _put(result, path, value)
    return result


def _selector(path: KeyPath) -> str | None:
    """Return the key that replaces a whole table: `preset` of the objective, `kind` of its slots; else None."""
    if path == (_OBJECTIVE,):
        return _PRESET
    return "kind" if len(path) == 2 and path[0] == _OBJECTIVE and path[1] != _PRESET else None


def _as_table(value: Any, path: KeyPath) -> Any:
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
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:  # a string, which then needs no quotes within the shell's quotes
        value = text.strip()
    keys = tuple(path.strip().split("."))
    selector = _selector(keys)
    return ((*keys, selector), value) if selector and isinstance(value, str) else (keys, value)


def _forget(table: dict[str, Any], path: KeyPath) -> None:
    node: Any = table
    for key in path[:-1]:
        node = node.get(key) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(path[-1], None)


def _put(table: dict[str, Any], path: KeyPath, value: Any) -> None:
    node: Any = table
    for depth, section in enumerate(path[:-1], start=1):
        if isinstance(node, list):
            child = next((table for table in node if table.get("name") == section), None)
            if child is None:
                there = ", ".join(str(table.get("name")) for table in node)
                parent = ".".join(path[: depth - 1])
                raise RecipeError(f"{'.'.join(path)}: none of {parent} is called {section}; there are {there}")
        else:
            child = node[section] = _as_table(node.get(section, {}), path[:depth])
        if not isinstance(child, dict) and not (depth < len(path) - 1 and _are_tables(child)):
            what = "a list of tables: name one, and a key of it" if _are_tables(child) else "not a table"
            raise RecipeError(f"{'.'.join(path)}: {section} is {what}")
        node = child
    node[path[-1]] = value


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


#: Keys, at any depth, whose value names a component: a registered name, or a reference to user code.
_NAME_A_PART: Final = frozenset({"type", "source", "verifier", "function", "filter", "environment"})
#: Tables of settings whose keys only the component itself understands; sources and environments name their paths.
_OF_A_PART: Final = frozenset({"parameters", "options", "environment_options"})


def resolved_beside(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Make the table's paths, which are relative to `folder`, absolute; replace few-shot paths by the files' contents.

    Raises `RecipeError` if a few-shot file cannot be read.
    """
    resolved: dict[str, Any] = _referenced("", table, folder)
    elastic = resolved.get("elastic")
    # The keys of `elastic.types` are engine types; a key that refers to user code may contain a path.
    if isinstance(elastic, dict) and isinstance(elastic.get("types"), dict):
        types = {anchored(type, folder): limits for type, limits in elastic["types"].items()}
        resolved["elastic"] = {**elastic, "types": types}
    domains = resolved.get("domains")
    if isinstance(domains, list):
        resolved["domains"] = [_with_files(domain, folder) for domain in domains]
    return resolved


def _referenced(key: str, value: Any, folder: Path) -> Any:
    if key in _OF_A_PART:
        return value
    if isinstance(value, Mapping):
        return {name: _referenced(name, item, folder) for name, item in value.items()}
    if isinstance(value, list):
        return [_referenced(key, item, folder) for item in value]
    return anchored(value, folder) if key in _NAME_A_PART and isinstance(value, str) else value


def _with_files(domain: Any, folder: Path) -> Any:
    """Make a domain's paths absolute, and read its few-shot file; values of a wrong type are left to validation."""
    if not isinstance(domain, dict):
        return domain
    made = dict(domain)
    kinds: tuple[tuple[str, registry.Components[Any], str], ...] = (
        ("source", registry.SOURCES, "parameters"),
        ("environment", registry.ENVIRONMENTS, "environment_options"),
    )
    for key, components, options in kinds:
        name, given = str(domain.get(key)).partition(":")[0], domain.get(options)
        if name in components and isinstance(given, dict):
            paths = components[name].paths
            made[options] = {key: _absolute(value, folder) if key in paths else value for key, value in given.items()}
    if isinstance(domain.get("command"), list):
        made["command"] = [
            str(folder / part) if isinstance(part, str) and part and (folder / part).is_file() else part
            for part in domain["command"]
        ]
    if isinstance(domain.get("few_shot"), str):
        path, where = Path(_absolute(domain["few_shot"], folder)), f"domains.{domain.get('name')}.few_shot"
        try:
            made["few_shot"] = from_json(path.read_bytes(), allow_inf_nan=False)
        except OSError as error:
            raise RecipeError(f"{where}: {path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise RecipeError(f"{where}: {path} is not JSON: {error}") from None
        if not isinstance(made["few_shot"], list):
            raise RecipeError(f"{where}: {path} must hold a list of messages with role and content")
    return made


def _absolute(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_absolute(item, folder) for item in value]
    return str(folder / from_home(value)) if isinstance(value, str) and value else value


# --- messages about keys that do not fit the schema -------------------------------------------------------------------
#
# The error message about a recipe has one line for each wrong field, with the expected and the given value. For an
# unknown key, it suggests the closest key of the section, or other sections that have the key. Values that no file can
# represent are rejected before the schema is applied.

#: The form of names that may identify a table of a list within a dotted path.
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
#: The largest integer that TOML, the journal and the streams can represent.
_LARGEST: Final = 2**63 - 1


def refuse_unwritable(value: Any, path: str = "") -> None:
    """Raise `RecipeError`, naming the key, if a text is not valid Unicode or an integer does not fit into 64 bits."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            refuse_unwritable(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            refuse_unwritable(item, f"{path}.{place}")
    elif isinstance(value, str) and SURROGATE.search(value):
        raise RecipeError(f"{path}: contains bytes that are not UTF-8, got {value!r}; rename that file or folder")
    elif isinstance(value, int) and abs(value) > _LARGEST:
        raise RecipeError(f"{path}: a whole number must be between -2^63 and 2^63, got {value}")


def refuse_absent_plugins(table: Mapping[str, Any]) -> None:
    """Raise `RecipeError` for a missing verifier, tool or tracker, whose keys would otherwise be called unknown."""
    loaded: list[tuple[registry.Components[Any], Any]] = [(registry.TRACKERS, table.get("trackers"))]
    for domain in _listed(table.get("domains")):
        where = f"domains.{domain.get('name')}"
        named = {f"{where}.verifier": domain.get("verifier")}
        for number, part in enumerate(_listed(domain.get("rewards"))):
            named[f"{where}.rewards.{number}.function"] = part.get("function")
        for key, name in named.items():
            if isinstance(name, str):
                registry.known(key, registry.VERIFIERS, name)
        episode = domain.get("episode")
        loaded.append((registry.TOOLS, episode.get("tools") if isinstance(episode, Mapping) else None))
    for kind, names in loaded:
        if isinstance(names, Mapping | list):
            _ = [kind[name] for name in names if isinstance(name, str) and name in kind]


def _listed(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def sentences(error: ValidationError, model: type[BaseModel], table: Mapping[str, Any]) -> str:
    """Return a line for each field of `model` that is invalid in `table`, without secrets."""
    # Messages by field. A field of a union type has an error for each type; they are joined into one line.
    messages: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    for problem in error.errors(include_url=False, include_context=False):
        # Leave out the steps by which pydantic names one type of a union, such as `literal['auto']`.
        steps = [step for step in problem["loc"] if not (isinstance(step, str) and step.endswith("]") and "[" in step)]
        path = _path(steps, table)
        message = problem["msg"].removeprefix("Value error, ")
        match problem["type"]:
            case "extra_forbidden":
                message = f"unknown key; {_meant(model, steps)}"
            case "missing":
                message = "must be given"
            case "value_error":
                # The message of an error about several fields already names the fields.
                path = "" if message.startswith(path) else path
            case "tuple_type" | "list_type" if isinstance(problem["input"], Mapping) and len(steps) == 1:
                message = f"is a list of tables: begin each with [[{path}]] instead of [{path}]"
            case "model_type" | "dataclass_type" | "dict_type":
                message, given[path] = "must be a table of keys", f", got {problem['input']!r}"
            case "string_type" if isinstance(problem["input"], int | float):
                message, given[path] = 'must be a text in quotes: "…"', f", got {problem['input']!r}"
            case _:
                given[path] = f", got {problem['input']!r}"
        messages.setdefault(path, []).append(message)
    lines = (
        f"{path}: {', or '.join(of)}{given.get(path, '')}" if path else "\n".join(of) for path, of in messages.items()
    )
    return without_secrets("\n".join(lines))


def _path(steps: list[int | str], table: Any) -> str:
    """Return the dotted path of a field, as written in an override: a table in a list is identified by its name."""
    names = []
    for step in steps:
        listed = isinstance(table, list) and isinstance(step, int) and step < len(table)
        there = listed or (isinstance(table, Mapping) and step in table)
        table = table[step] if there else None
        name = table.get("name") if isinstance(step, int) and isinstance(table, Mapping) else None
        names.append(name if isinstance(name, str) and _NAME.fullmatch(name) else str(step))
    return ".".join(names)


def _meant(model: type[BaseModel], steps: list[int | str]) -> str:
    *above, key = steps
    section: type[BaseModel] | None = model
    for step in above:
        if isinstance(step, str) and section is not None:
            field = section.model_fields.get(step)
            section = next(_models(field.annotation), None) if field is not None else None
    known = list(section.model_fields) if section is not None else []
    if key in HABITS:
        return f"did you mean {HABITS[str(key)]}?"
    paths: dict[str, list[str]] = {}
    for name, info in model.model_fields.items():
        for each in _models(info.annotation):
            for inner in each.model_fields if each is not section else ():
                paths.setdefault(inner, []).append(f"{name}.{inner}")
    if key in paths:
        return f"did you mean {' or '.join(paths[str(key)])}?"
    if near := difflib.get_close_matches(str(key), known, n=1):
        return f"did you mean {near[0]}?"
    if near := difflib.get_close_matches(str(key), paths, n=1, cutoff=0.75):
        return f"did you mean {' or '.join(paths[near[0]])}?"
    return f"known keys are {', '.join(known)}"


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)
