"""`trainer.json`, the record of a trainer's state on disk, shared by all array libraries.

    format, model_version, architecture, and fields that a trainer adds

Reading a record checks that its format is known and that it belongs to the expected model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trainer_contract.errors import StateError

_FILE: Final = "trainer.json"
_FORMAT: Final = 1


def architecture_of(fields: Mapping[str, Any]) -> str:
    """Return a digest of the configuration fields that define a model."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:32]


def write_record(path: Path, *, model_version: int, architecture: str, **further: Any) -> None:
    """Write `trainer.json` into the existing directory `path`.

    Write it last, after all other files: a state without this record counts as missing.
    """
    record = {"format": _FORMAT, "model_version": model_version, "architecture": architecture, **further}
    (path / _FILE).write_text(json.dumps(record, indent=1) + "\n")


def read_record(path: Path, *, architecture: str, model_type: str) -> Mapping[str, Any]:
    """Read the record in `path` and check it against the model given by `model_type` and `architecture`.

    Raises:
        StateError: the record is missing, damaged, of another format or of another model.
    """
    try:
        record: dict[str, Any] = json.loads((path / _FILE).read_text())
        record["model_version"] = int(record["model_version"])
        saved_architecture, saved_format = record["architecture"], record["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, error) from error
    if saved_format != _FORMAT:
        raise StateError(f"the trainer state in {path} has format {saved_format!r}, expected {_FORMAT}")
    if saved_architecture != architecture:
        raise StateError(
            f"the trainer state in {path} is of another model than model_path ({model_type}); "
            "start from the model it was saved with"
        )
    return record


def damaged(path: Path, error: Exception) -> StateError:
    """Return the error for a state in `path` that cannot be read because of `error`."""
    return StateError(f"the trainer state in {path} is missing or damaged: {error}; restore another checkpoint")
