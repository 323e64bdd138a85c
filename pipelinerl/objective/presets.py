"""Recipe tables that select a named algorithm and adjust it, or define all five terms (slots) of the objective.

[objective]
preset = "grpo"                        # the other keys adjust it
grad2 = { kind = "kl", beta = 0.04 }   # another kind for the slot: its defaults, then these fields
grad1.epsilon_high = 0.28              # the same kind with a field changed
is_weight = "one"                      # a kind with its defaults
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from enum import StrEnum
from types import UnionType
from typing import Any, Final, NamedTuple

from pipelinerl.enums import NoSignal
from pipelinerl.errors import RecipeError, did_you_mean
from pipelinerl.objective import adv, agg, grad1, grad2, is_weight
from pipelinerl.objective.catalogue import DEFAULT, PRESETS
from pipelinerl.objective.contradictions import contradictions
from pipelinerl.objective.objective import PolicyObjective

#: The kinds that a recipe can choose for each slot: their classes by name.
SLOTS: Final[Mapping[str, Mapping[str, type[Any]]]] = {
    "agg": agg.KINDS,
    "is_weight": is_weight.KINDS,
    "adv": adv.KINDS,
    "grad1": grad1.KINDS,
    "grad2": grad2.KINDS,
}


def resolve(choice: str | Mapping[str, Any], *, max_tokens: int | None = None) -> PolicyObjective:
    """Return the algorithm for a preset's name or a recipe table (see the example in this module's docstring).

    `max_tokens` is the maximum number of sampled tokens in an answer; `agg.length` may refer to it.

    Raises:
        RecipeError: a preset, slot, kind or field is unknown, a value has the wrong type, or a combination of slots
            makes no sense.
    """
    table: Mapping[str, Any] = {"preset": choice} if isinstance(choice, str) else choice
    base = _entry(PRESETS, preset_of(table), "objective.preset").objective
    slots = {name: value for name, value in table.items() if name != "preset"}
    _refuse_unknown(slots, ("preset", *SLOTS), "objective")
    changes = {name: _slot(SLOTS[name], getattr(base, name), v, f"objective.{name}") for name, v in slots.items()}
    objective = dataclasses.replace(base, **changes)
    for sentence in contradictions(objective):
        raise RecipeError(f"objective.{sentence}")
    if max_tokens is not None and objective.agg == agg.Sequences(length=agg.Length.MAX_TOKENS):
        return dataclasses.replace(objective, agg=agg.Sequences(length=float(max_tokens)))
    return objective


def preset_of(choice: str | Mapping[str, Any]) -> Any:
    """Return the name of the preset on which a recipe's objective is based, without validating it."""
    return choice if isinstance(choice, str) else choice.get("preset", DEFAULT)


def no_signal_of(choice: str | Mapping[str, Any]) -> NoSignal:
    """Return how the preset of `choice` treats groups with equal rewards. Raises RecipeError for an unknown preset."""
    return _entry(PRESETS, preset_of(choice), "objective.preset").no_signal


def to_table(objective: PolicyObjective) -> dict[str, dict[str, Any]]:
    """Return the full recipe table of an objective; `resolve` converts it back to an equal objective."""
    table = {}
    for slot, kinds in SLOTS.items():
        value = getattr(objective, slot)
        kind = next(name for name, cls in kinds.items() if cls is type(value))
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        table[slot] = {"kind": kind} | {k: str(v) if isinstance(v, StrEnum) else v for k, v in fields.items()}
    return table


class SlotLine(NamedTuple):
    """One slot (term of RLAX Eq. 3): its name, its kind with its fields, its formula, and the columns it reads."""

    slot: str
    kind: str
    formula: str
    needs: tuple[str, ...]


def slot_lines(objective: PolicyObjective) -> list[SlotLine]:
    """Return a line for each of the five slots: agg, is_weight, adv, grad1, grad2."""
    lines = []
    for slot, table in to_table(objective).items():
        fields = ", ".join(f"{name} = {value}" for name, value in table.items() if name != "kind")
        value = getattr(objective, slot)
        needs = tuple(sorted(getattr(value, "needs", ())))
        lines.append(SlotLine(slot, f"{table['kind']}({fields})" if fields else table["kind"], value.formula, needs))
    return lines


def differing(objective: PolicyObjective, preset: PolicyObjective) -> dict[str, str]:
    """Return, for each slot in which `objective` differs from a preset, the preset's kind and fields."""
    pairs = zip(slot_lines(objective), slot_lines(preset), strict=True)
    return {ours.slot: theirs.kind for ours, theirs in pairs if ours.kind != theirs.kind}


def _slot(kinds: Mapping[str, type[Any]], current: Any, choice: Any, path: str) -> Any:
    table = {"kind": choice} if isinstance(choice, str) else choice
    if not isinstance(table, Mapping):
        raise RecipeError(f"{path} must be the name of a kind or a table, got {choice!r}; kinds: {', '.join(kinds)}")
    cls = _entry(kinds, table["kind"], f"{path}.kind") if "kind" in table else type(current)
    start = current if cls is type(current) else cls()
    hints = typing.get_type_hints(cls)
    types = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    fields = {name: value for name, value in table.items() if name != "kind"}
    _refuse_unknown(fields, ("kind", *types), path)
    return dataclasses.replace(start, **{n: _convert(v, types[n], f"{path}.{n}") for n, v in fields.items()})


def _convert(value: Any, wanted: Any, path: str) -> Any:
    if isinstance(wanted, UnionType):
        words = next(kind for kind in typing.get_args(wanted) if issubclass(kind, StrEnum))
        return _convert(value, words if isinstance(value, str) else float, path)
    if issubclass(wanted, StrEnum):
        return _entry({str(member): member for member in wanted}, value, path)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise RecipeError(f"{path} must be a number, got {value!r}")
    if value < 0:
        raise RecipeError(f"{path} must not be negative, got {value!r}")
    if wanted is int and not isinstance(value, int):
        raise RecipeError(f"{path} must be a whole number, got {value!r}")
    return wanted(value)


def _entry(entries: Mapping[str, Any], name: Any, path: str) -> Any:
    if not isinstance(name, str) or name not in entries:
        raise RecipeError(f"{path} must be one of {', '.join(entries)}; got {name!r}{did_you_mean(name, entries)}")
    return entries[name]


def _refuse_unknown(table: Mapping[str, Any], known: tuple[str, ...], path: str) -> None:
    for name in table:
        if name not in known:
            raise RecipeError(f"{path}.{name} is unknown; expected one of {', '.join(known)}")
