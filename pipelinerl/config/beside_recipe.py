"""Files that a recipe's domains name: the paths of data become absolute, and few-shot files are read.

Promises that what is read of a recipe means the same wherever it is saved: a path is relative to the file that says it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import orjson

from pipelinerl.errors import RecipeError

#: Parameters of the source `files`.
_PATHS: Final = ("path", "validation_path", "held_out_path")
_FILES: Final = "files"


def resolved_beside(table: Mapping[str, Any], recipe: Path) -> dict[str, Any]:
    """The table of the file `recipe`, with what its domains name.

    Raises:
        RecipeError: a few-shot file is missing, or holds no messages.
    """
    domains = table.get("domains")
    if not isinstance(domains, list):
        return dict(table)
    folder = recipe.resolve().parent
    return {**table, "domains": [_of_domain(domain, folder) for domain in domains]}


def _of_domain(domain: Any, folder: Path) -> Any:
    """What is no table is left to the schema to refuse."""
    if not isinstance(domain, dict):
        return domain
    made, parameters = dict(domain), domain.get("parameters")
    if domain.get("source") == _FILES and isinstance(parameters, dict):
        made["parameters"] = {
            key: _absolute(value, folder) if key in _PATHS else value for key, value in parameters.items()
        }
    if isinstance(domain.get("few_shot"), str):
        made["few_shot"] = _messages(Path(_absolute(domain["few_shot"], folder)), domain.get("name"))
    return made


def _absolute(value: Any, folder: Path) -> Any:
    """A path or glob, or a list of them."""
    if isinstance(value, list):
        return [_absolute(item, folder) for item in value]
    return str(folder / Path(value).expanduser()) if isinstance(value, str) and value else value


def _messages(path: Path, domain: Any) -> Any:
    where = f"domains.{domain}.few_shot"
    try:
        messages = orjson.loads(path.read_bytes())
    except OSError as error:
        raise RecipeError(f"{where}: {path} cannot be read: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise RecipeError(f"{where}: {path} is no JSON: {error}") from None
    if not isinstance(messages, list):
        raise RecipeError(f"{where}: {path} must hold a list of messages with role and content")
    return messages
