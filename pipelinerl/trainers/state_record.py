"""`trainer.json`: the record of a trainer's state on disk, the same for every array library.

    format, model_version, architecture, and what a trainer adds

Promises: a record that can be read is of the model that was asked for, in a format that is known.
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
    """Return a digest of what makes a model the model it is: the fields of its configuration that matter."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:32]


def write_record(path: Path, *, model_version: int, architecture: str, **further: Any) -> None:
    """Write the record below the existing directory `path`; it comes last, since without it there is no state."""
    record = {"format": _FORMAT, "model_version": model_version, "architecture": architecture, **further}
    (path / _FILE).write_text(json.dumps(record, indent=1) + "\n")


def read_record(path: Path, *, architecture: str, model_type: str) -> Mapping[str, Any]:
    """Read the record below `path` and check it against the model that `model_type` and `architecture` stand for.

    Raises:
        StateError: it is missing, damaged, of another format or of another model.
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
    """Return the error of a state in `path` that cannot be read because of `error`."""
    return StateError(f"the trainer state in {path} is missing or damaged: {error}; restore another checkpoint")
