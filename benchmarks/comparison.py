"""Arms that were trained with several seeds, side by side: a row for each, its mean and its range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol, TypeVar


class Trained(Protocol):
    """One run of an arm; its figures are further attributes."""

    @property
    def arm(self) -> str:
        """The arm's name."""
        ...

    @property
    def completed(self) -> bool:
        """Did it take all of its steps?"""
        ...


@dataclass(frozen=True, slots=True)
class Column:
    """A figure: what it is called, the attribute that holds it, and how it is written."""

    heading: str
    attribute: str
    form: str


T = TypeVar("T", bound=Trained)


def by_arm(runs: Sequence[T]) -> Mapping[str, list[T]]:
    """The runs of each arm, in the order in which the arms first appear."""
    arms: dict[str, list[T]] = {}
    for each in runs:
        arms.setdefault(each.arm, []).append(each)
    return arms


def table(runs: Sequence[Trained], columns: Sequence[Column]) -> str:
    """Markdown: a row for each arm, the mean over its seeds, and their range in brackets where they differ."""
    lines = ["| arm | " + " | ".join(column.heading for column in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, arm in by_arm(runs).items():
        cells = [_spread([getattr(run, column.attribute) for run in arm], column.form) for column in columns]
        broken = sum(not run.completed for run in arm)
        mark = f" ({broken} of {len(arm)} broke down)" if broken else ""
        lines.append(f"| {name}{mark} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _spread(values: Sequence[float], form: str) -> str:
    mean, low, high = (format(value, form) for value in (fmean(values), min(values), max(values)))
    return mean if low == high else f"{mean} [{low}, {high}]"
