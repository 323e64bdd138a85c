"""Error messages for recipes that do not fit the schema: one line for each field, with the expected and the given
value.

For an unknown key the message suggests what was meant: the closest key of the same section, or the sections that
have a key of this name. Values that no file could represent, and that could not be passed on to roles, are rejected
first.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError

from pipelinerl.errors import RecipeError
from pipelinerl.observability.logs import without_secrets

#: The form of names that may identify a table of a list within a dotted path.
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
#: The largest integer that TOML, the journal and the streams can represent.
_LARGEST: Final = 2**63 - 1


def refuse_unwritable(value: Any, path: str = "") -> None:
    """Check that all texts are valid Unicode and all integers fit into 64 bits.

    Raises:
        RecipeError: names the key of the first value that does not.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            refuse_unwritable(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            refuse_unwritable(item, f"{path}.{place}")
    elif isinstance(value, str) and not _is_unicode(value):
        raise RecipeError(f"{path}: contains bytes that are not UTF-8, got {value!r}; rename that file or folder")
    elif isinstance(value, int) and abs(value) > _LARGEST:
        raise RecipeError(f"{path}: a whole number must be between -2^63 and 2^63, got {value}")


def sentences(error: ValidationError, model: type[BaseModel], table: Mapping[str, Any]) -> str:
    """Return a line for each field of `model` that is invalid in `table`, without secrets."""
    said: dict[str, list[str]] = {}  # by field: the errors of the types of a union become one line
    came: dict[str, str] = {}
    for problem in error.errors(include_url=False, include_context=False):
        steps = [step for step in problem["loc"] if not _is_choice(step)]
        path = _path(steps, table)
        message = problem["msg"].removeprefix("Value error, ")
        match problem["type"]:
            case "extra_forbidden":
                message = f"unknown key; {_meant(model, steps)}"
            case "missing":
                message = "must be given"
            case "value_error":
                path = "" if message.startswith(path) else path  # an error about several fields already names them
            case "tuple_type" | "list_type" if isinstance(problem["input"], Mapping) and len(steps) == 1:
                message = f"is a list of tables: begin each with [[{path}]] instead of [{path}]"
            case "model_type" | "dataclass_type" | "dict_type":
                message, came[path] = "must be a table of keys", f", got {problem['input']!r}"
            case "string_type" if isinstance(problem["input"], int | float):
                message, came[path] = 'must be a text in quotes: "…"', f", got {problem['input']!r}"
            case _:
                came[path] = f", got {problem['input']!r}"
        said.setdefault(path, []).append(message)
    lines = (f"{path}: {', or '.join(of)}{came.get(path, '')}" if path else "\n".join(of) for path, of in said.items())
    return without_secrets("\n".join(lines))


def _path(steps: list[int | str], table: Any) -> str:
    """Return the dotted path of a field, as written in an override: a table in a list is identified by its name."""
    said = []
    for step in steps:
        listed = isinstance(table, list) and isinstance(step, int) and step < len(table)
        there = listed or (isinstance(table, Mapping) and step in table)
        table = table[step] if there else None
        name = table.get("name") if isinstance(step, int) and isinstance(table, Mapping) else None
        said.append(name if isinstance(name, str) and _NAME.fullmatch(name) else str(step))
    return ".".join(said)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_choice(step: int | str) -> bool:
    """Return True if this step of the path is a type of a union, added by pydantic, such as `literal['auto']`."""
    return isinstance(step, str) and step.endswith("]") and "[" in step


def _meant(model: type[BaseModel], steps: list[int | str]) -> str:
    """Suggest the key that the user probably meant instead of an unknown key."""
    *above, key = steps
    section = _section_at(model, above)
    known = list(section.model_fields) if section is not None else []
    if near := difflib.get_close_matches(str(key), known, n=1):
        return f"did you mean {near[0]}?"
    if elsewhere := [name for name, each in _sections(model) if key in each.model_fields and each is not section]:
        return f"did you mean {' or '.join(f'{name}.{key}' for name in elsewhere)}?"
    return f"known keys are {', '.join(known)}"


def _section_at(model: type[BaseModel], steps: list[int | str]) -> type[BaseModel] | None:
    """Return the class of the section at this path; list indices are skipped."""
    for step in steps:
        if isinstance(step, str):
            found = model.model_fields.get(step)
            below = next(_models(found.annotation), None) if found is not None else None
            if below is None:
                return None
            model = below
    return model


def _sections(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in model.model_fields.items():
        yield from ((name, below) for below in _models(field.annotation))


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models that occur in a type: the type itself, members of a union, and elements of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)
