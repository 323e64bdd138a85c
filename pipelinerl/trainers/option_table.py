"""Parsing of a recipe's `trainer.options`; unknown options and values of the wrong type are rejected by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from enum import StrEnum
from typing import Any, TypeVar

from trainer_contract.errors import SpecError

Choice = TypeVar("Choice", bound=StrEnum)


def table(value: Any, kind: type[Any], where: str, *, trainer: str) -> Mapping[str, Any]:
    """Check that `value` is a table whose keys are fields of the dataclass `kind`, and return it. Raises SpecError."""
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
    """Raise SpecError if the options request LoRA adapters, for trainers without them."""
    if "lora" in options:
        raise SpecError(
            "options.lora: the JAX trainer has no adapters, only the torch trainer does; leave lora out, "
            "or set trainer.type = torch"
        )
