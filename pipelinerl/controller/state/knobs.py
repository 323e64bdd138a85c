"""The knobs of a live run: validated as a whole, changed by patches, and logged with time and author.

A change is accepted immediately and takes effect at the next step boundary. The log is append-only and part of a
snapshot. A resumed run begins with the knobs of its recipe, and then applies the live changes in the log.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from reprlib import repr as short
from typing import Any, Final, Self

from pipelinerl.data.mixture import groups_of_step
from pipelinerl.enums import COLDEST, HOTTEST
from pipelinerl.errors import RecipeError, did_you_mean
from pipelinerl.staleness import AUTO, MODES, StalenessBounds

_FIXED: Final = frozenset({"group_sizes", "max_groups", "k_finite"})
#: Knobs that are tables of integers by engine type; only elastic runs use them.
_LIMITS: Final = ("engines_min", "engines_max")
_WHOLE: Final = frozenset({"j", "rollouts_per_step", "evaluation_interval_steps", "groups_in_flight"})

#: The largest value of any knob (except k, which may be infinite), so that the journal and streams can encode it.
LARGEST: Final = 2**31 - 1
#: The largest number of engines of one type.
MOST_ENGINES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """Settings that may change while the run is live; `group_sizes` and the fields after it only serve validation."""

    j: int | None
    """None: the run chooses j, and whether it keeps any lag at all."""
    k: float
    temperature: float
    learning_rate: float
    rollouts_per_step: int
    evaluation_interval_steps: int
    groups_in_flight: int
    """Groups in flight per actor: the concurrency that engines see."""
    domain_weights: dict[str, float]
    """Sampling weights of the domains, by name; they need not sum to 1, and 0 disables a domain."""
    engines_min: dict[str, int] = field(default_factory=dict)
    """Minimum number of engines by type for automatic scaling; the run is elastic if any type is listed."""
    engines_max: dict[str, int] = field(default_factory=dict)
    group_sizes: dict[str, int]
    max_groups: int = 2**31
    """The most groups in flight, over all actors; a step that needs more could never be filled."""
    k_finite: bool = False
    """True if k must be finite, since the trainer keeps the weights of every version that a rollout may come from."""

    def __post_init__(self) -> None:
        StalenessBounds(self.j or 1, self.k)
        if self.k_finite and math.isinf(self.k):
            raise RecipeError(
                "staleness.k must be a number with training.old_logprobs = sampling_weights, got inf: the weights of "
                "every version that a rollout may come from are kept, and inf sets no bound"
            )
        positive = {
            "temperature": self.temperature,
            "learning_rate": self.learning_rate,
            "rollouts_per_step": self.rollouts_per_step,
            "evaluation_interval_steps": self.evaluation_interval_steps,
            "groups_in_flight": self.groups_in_flight,
            "the sum of domain_weights": sum(self.domain_weights.values()),
        }
        for name, value in positive.items():
            if not (value > 0 and math.isfinite(value)):
                raise RecipeError(f"{name} must be a positive number, got {value}")
        for name, value in (positive | {"j": self.j or 1, "k": self.k}).items():
            if value > LARGEST and not (name == "k" and math.isinf(value)):
                raise RecipeError(f"{name} must be at most {LARGEST}, got {value:g}")
        if not COLDEST <= self.temperature <= HOTTEST:
            raise RecipeError(f"temperature must be from {COLDEST:g} to {HOTTEST:g}, got {self.temperature:g}")
        for domain, weight in self.domain_weights.items():
            if weight < 0:
                raise RecipeError(f"domain_weights.{domain} must not be negative, got {weight:g}")
        for type, least in self.engines_min.items():
            if not 0 <= least <= (most := self.engines_max[type]) or not 0 < most <= MOST_ENGINES:
                raise RecipeError(
                    f"engines_min.{type} and engines_max.{type} must be in order, from 0 and 1 to {MOST_ENGINES}, got "
                    f"{least} and {most}"
                )
        # A step consists of whole groups: exactly `rollouts_per_step` if all groups have the same size.
        rollouts, smallest, largest = self.rollouts_per_step, min(self.group_sizes.values()), self.max_group_size
        room, must = self.max_groups * smallest, ""
        if smallest == largest and rollouts % smallest:
            must = f"a multiple of the group size {smallest}"
        elif rollouts < largest:
            must = f"at least the largest group size, {largest}"
        elif rollouts > room:
            must = f"at most {room}, the capacity of the streams (streams.max_groups)"
        if must:
            raise RecipeError(f"rollouts_per_step must be {must}, got {rollouts}")

    @property
    def groups_per_step(self) -> int:
        """The number of groups in a step; an average if group sizes differ."""
        return groups_of_step(self.rollouts_per_step, self.group_sizes, self.domain_weights)

    @property
    def max_group_size(self) -> int:
        """The most rollouts of a group, over all domains."""
        return max(self.group_sizes.values())

    def patched(self, changes: Mapping[str, Any]) -> Self:
        """Return these knobs with `changes` applied, validated as a whole.

        `mode` sets j and k together; j may be the string `auto`, k the string `inf`. `domain_weights.<domain>` sets one
        weight, a table `domain_weights` several. Raises RecipeError for an unknown knob or a wrong type, or if a run
        cannot use these values.
        """
        values: dict[str, Any] = {}
        for name, value in changes.items():
            table, _, row = name.partition(".")
            if name == "mode":
                if not isinstance(value, str) or value not in MODES:
                    hint = did_you_mean(value, MODES)
                    raise RecipeError(f"mode must be one of {', '.join(MODES)}, got {short(value)}{hint}")
                values |= {"j": None if value == AUTO else MODES[value].j, "k": MODES[value].k}
            elif name == "j" and value == AUTO:
                values["j"] = None
            elif table == "domain_weights" or (table in _LIMITS and getattr(self, table)):
                values[table] = values.get(table, getattr(self, table)) | self._rows(
                    table, {row: value} if row else value
                )
            else:
                values[name] = self._converted(name, value)
        return replace(self, **values)

    def with_live(self, log: Iterable[KnobChange]) -> Self:
        """Return the recipe's knobs with the live changes in `log`; removed domains and engine types are left out."""
        changes: dict[str, Any] = {}
        for change in log:
            changes |= change.changes if change.live else {}
        for table in ("domain_weights", *_LIMITS):
            known = getattr(self, table)
            if left := {name: each for name, each in changes.pop(table, {}).items() if name in known}:
                changes[table] = left
        return self.patched(changes)

    def to_json(self) -> dict[str, Any]:
        """Return plain values; a j that the run chooses becomes `auto`, and an infinite k `inf`, as in `patched`."""
        left_out = {*_FIXED, *(name for name in _LIMITS if not getattr(self, name))}
        values = {name: value for name, value in asdict(self).items() if name not in left_out}
        return values | {"j": self.j or AUTO, "k": "inf" if math.isinf(self.k) else int(self.k)}

    def _rows(self, table: str, given: Any) -> dict[str, float]:
        """Check the numbers `given` for a table such as `domain_weights`; return them by domain or by engine type."""
        known, are_limits = getattr(self, table), table in _LIMITS
        if not isinstance(given, Mapping) or not given:
            rows = "whole numbers by engine type" if are_limits else "numbers by domain"
            raise RecipeError(f"{table} must be a table of {rows}, got {short(given)}")
        for each in given:
            if each not in known:
                what = "type {}; types that elastic.types names" if are_limits else "domain {}; domains"
                raise RecipeError(f"unknown {what.format(short(each))} are {', '.join(known)}")
        numbers = {each: _number(f"{table}.{each}", number, whole=are_limits) for each, number in given.items()}
        return {each: int(number) for each, number in numbers.items()} if are_limits else numbers

    def _converted(self, name: str, value: Any) -> Any:
        changeable = {field.name for field in fields(self)} - {*_FIXED, *_LIMITS}
        if name not in changeable:
            raise RecipeError(
                f"unknown knob {short(name)}; knobs are {', '.join(sorted(changeable))} and mode"
                f"{did_you_mean(name, changeable)}"
            )
        number = _number(name, value, whole=name in _WHOLE)
        return int(number) if name in _WHOLE else number


def _number(name: str, value: Any, *, whole: bool = False) -> float:
    try:
        number = float(value)
        if isinstance(value, str) and math.isinf(number) and "inf" not in value.lower():
            number = math.nan  # reject 1e999, a typo that Python reads as infinity
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or math.isnan(number) or (whole and not number.is_integer()):
        raise RecipeError(f"{name} must be a {'whole ' if whole else ''}number, got {short(value)}")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobChange:
    """One entry of the knob log, made before order `cursor` was issued; not `live` if the recipe was edited."""

    time: float
    step: int
    cursor: int = 0
    who: str
    changes: dict[str, Any]
    live: bool = True
