"""The source `hub:<id>`: a data set of the Hugging Face hub, fetched into the hub's cache and then read as a folder.

No code of the data set is run: only its description and data files are fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from pipelinerl.data.files.layouts import SUFFIXES
from pipelinerl.data.files.rows import FirstRows
from pipelinerl.data.files.source import RowSource, look_at_files, open_files
from pipelinerl.data.source import SourceRequest
from pipelinerl.errors import RecipeError
from pipelinerl.types import Problem

#: Longest wait, in seconds, for the hub's response.
_ANSWER_S: Final = 10.0


def open_hub(request: SourceRequest) -> RowSource:
    """Open the data set that `request.argument` names. Raises `RecipeError` if it cannot be fetched, or is invalid.

    Parameters are those of `files` without `path`, plus `revision`.
    """
    revision, parameters = _parsed(request)
    folder = _fetched(request.argument, revision, where=request.where)
    return open_files(replace(request, argument="", parameters={**parameters, "path": folder}))


def look_at_hub(request: SourceRequest, head: FirstRows, check: Callable[[Problem], None]) -> Problem | None:
    """Act like `look_at_files` on the data set's first rows; return None if it is not cached: nothing is fetched."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    revision, parameters = _parsed(request)
    try:
        folder = _snapshot(request.argument, revision, local=True)
    except (LocalEntryNotFoundError, ValueError):  # ValueError: an invalid name, which `open_hub` reports later
        return None
    return look_at_files(replace(request, argument="", parameters={**parameters, "path": folder}), head, check)


def _parsed(request: SourceRequest) -> tuple[str | None, dict[str, Any]]:
    if not request.argument or "path" in request.parameters:
        raise RecipeError(f"{request.where}.source must be hub:<id of a data set>, without parameters.path")
    parameters = dict(request.parameters)
    revision = parameters.pop("revision", None)
    if not (revision is None or isinstance(revision, str)):
        raise RecipeError(f"{request.where}.parameters.revision must be a branch, tag or commit, got {revision!r}")
    return revision, parameters


def _snapshot(name: str, revision: str | None, *, local: bool) -> str:
    from huggingface_hub import snapshot_download

    wanted = ["README.md", *(f"*{suffix}{packed}" for suffix in SUFFIXES for packed in ("", ".gz"))]
    return snapshot_download(
        name,
        repo_type="dataset",
        revision=revision,
        allow_patterns=wanted,
        etag_timeout=_ANSWER_S,
        local_files_only=local,
    )


def _fetched(name: str, revision: str | None, *, where: str) -> str:
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]

    try:
        return _snapshot(name, revision, local=False)
    except HFValidationError as error:
        raise RecipeError(f"{where}.source: {error}") from None
    except (OSError, HTTPError, RuntimeError) as error:  # the hub's client raises any of these
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RecipeError(
            f"{where}.source: hub:{name} cannot be fetched from here, and is not in the cache ({reason[0]}); without "
            'access to the hub, copy the folder of the data set here and set source = "files" with its path'
        ) from None
