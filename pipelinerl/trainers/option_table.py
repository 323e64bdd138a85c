"""Parsing of trainer options, and of `trainer.json`, the record of a saved state; errors name the invalid entry."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar

from trainer_contract.errors import SpecError, StateError

Choice = TypeVar("Choice", bound=StrEnum)


def table(value: Any, kind: type[Any], where: str, *, trainer: str) -> Mapping[str, Any]:
    """Return `value` if it is a table whose keys are fields of the dataclass `kind`, else raise SpecError."""
    if not isinstance(value, Mapping):
        raise SpecError(f"{where} must be a table, got {value!r}")
    refuse_unknown(value, [field.name for field in fields(kind)], where, trainer=trainer)
    return value


def refuse_unknown(options: Iterable[str], known: list[str], where: str, *, trainer: str) -> None:
    """Raise SpecError for an option that is not in `known`."""
    for name in options:
        if name not in known:
            raise SpecError(f"{where}.{name} is unknown to the {trainer} trainer; it knows {', '.join(known)}")


def whole(value: Any, where: str, *, least: int) -> int:
    """Return `value` if it is a whole number of at least `least`, else raise SpecError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(f"{where} must be a whole number of at least {least}, got {value!r}")
    return value


def one_of(kind: type[Choice], value: Any, where: str) -> Choice:
    """Return `value` as a member of the enum `kind`, else raise SpecError."""
    if value not in tuple(kind):
        raise SpecError(f"{where} must be {' or '.join(kind)}, got {value!r}")
    return kind(value)


def refuse_lora(options: Mapping[str, Any]) -> None:
    """Raise SpecError if the options request LoRA adapters; for trainers that do not support adapters."""
    if "lora" in options:
        raise SpecError(
            "options.lora: the JAX trainer has no adapters, only the torch trainer does; leave lora out, "
            "or set trainer.type = torch"
        )


_FILE: Final = "trainer.json"
_FORMAT: Final = 1


def architecture_of(fields: Mapping[str, Any]) -> str:
    """Return a digest of the configuration fields that define a model."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:32]


def write_record(path: Path, *, model_version: int, architecture: str, **further: Any) -> None:
    """Write `trainer.json` into the directory `path`, after all other files: a state without it counts as missing."""
    record = {"format": _FORMAT, "model_version": model_version, "architecture": architecture, **further}
    (path / _FILE).write_text(json.dumps(record, indent=1) + "\n")


def read_record(path: Path, *, architecture: str, model_type: str) -> Mapping[str, Any]:
    """Read `trainer.json` in `path`. Raises StateError if it is missing, damaged, or of another format or model."""
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
