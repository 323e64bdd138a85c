"""Resolution of file names in a recipe: makes paths of user code and data absolute, and reads few-shot files.

A path is relative to the file that contains it. The resolved recipe, which roles and resumed runs read from the run's
directory, contains absolute paths only, so it means the same wherever it is saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import orjson

from pipelinerl.errors import RecipeError
from pipelinerl.system.files import from_home
from pipelinerl.system.references import anchored

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
