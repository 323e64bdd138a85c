"""`SolvedProblems`: which groups were all right, until the controller has heard of it. Pure.

The controller passes such problems over for a while (`controller/state/cooldown.py`). What it has not answered for lies
in the checkpoint, so that a run that goes on from there knows as much as it did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

from pipelinerl.types import Outcome, RolloutGroup

#: By domain, the order and the problem's id.
Pairs = dict[str, list[tuple[int, str]]]


@final
class SolvedProblems:
    """The orders of the groups that were all right, in the order in which they ended."""

    def __init__(self, restored: Mapping[str, Sequence[Sequence[Any]]] | None = None) -> None:
        """`restored` is what a checkpoint holds."""
        self._waiting: list[tuple[str, int, str]] = [
            (domain, int(order), str(name)) for domain, pairs in (restored or {}).items() for order, name in pairs
        ]
        self._reported: tuple[str, int] = ("", 0)

    def note(self, groups: Iterable[RolloutGroup]) -> None:
        """Groups have ended, trained or filtered. One with an answer that nobody judged is not all right."""
        for group in groups:
            if group.problem.problem_id and all(each.verdict.outcome is Outcome.CORRECT for each in group.rollouts):
                self._waiting.append((group.domain, group.index, group.problem.problem_id))

    @property
    def pending(self) -> Pairs:
        """What the controller may not know of."""
        pairs: Pairs = {}
        for domain, order, name in self._waiting:
            pairs.setdefault(domain, []).append((order, name))
        return pairs

    def report(self, report_id: str) -> Pairs:
        """What is pending, for the report of this name."""
        self._reported = (report_id, len(self._waiting))
        return self.pending

    def answered(self, report_id: str) -> None:
        """The controller has answered a report: it knows what that report said."""
        if report_id == self._reported[0]:
            del self._waiting[: self._reported[1]]
            self._reported = ("", 0)
