"""`staleness.overdue = "wait"`: the trainer takes no step by which a group that is still being sampled would be lost.

Dropping what is too old favours short answers: the long ones come late. Each order can surely train up to some step,
since its tokens come from no older weights than those that the engines held when it was issued (the controller says
which: `Directive.fresh_until`). Groups train in the order of issue, earliest deadline first. Before a step it is looked
whether all that is out could still be trained in time: by every later step d at most (d − step) × groups of a step may
be due. If not, the step waits for those that are still out.

| waits for | at most | who unblocks it |
|---|---|---|
| a group that is due | `overdue_s` for each step | its actor; the controller, which says at once that it failed |

Then the step is taken without it, the log names the orders, and what comes too late is stale, as with "drop".
"""

from __future__ import annotations

import bisect
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import final

from pipelinerl.messages import Directive
from pipelinerl.training.rollouts.admission import ConsumedLedger

log = logging.getLogger("pipelinerl")


def awaited(
    *,
    step: int,
    chosen: Sequence[int],
    waiting: Iterable[int],
    ledger: ConsumedLedger,
    directive: Directive,
) -> list[int]:
    """Orders that are out and without which `step` must not be taken; none where all that is out will be in time.

    Args:
        step: the version that it would produce.
        chosen: the orders whose groups it would train; as many are taken for what a later step trains.
        waiting: the orders of all groups that are here.
    """
    firsts = [first for first, _ in directive.fresh_until]
    if not firsts:
        return []
    here, taken = set(waiting), set(chosen)
    last_step: dict[int, int] = {}
    for index in range(max(ledger.frontier, firsts[0]), directive.issued):
        if index not in taken and not ledger.has(index):
            last_step[index] = directive.fresh_until[bisect.bisect_right(firsts, index) - 1][1]
    due = 0
    for deadline, count in sorted(Counter(last_step.values()).items()):
        due += count
        if due > len(chosen) * max(0, deadline - step):
            late = [index for index, last in last_step.items() if last <= deadline and index not in here]
            if late:
                return late
    return []


@final
class OverdueWait:
    """Decides, again and again while a step is full, whether it waits for others; each step at most `timeout_s`."""

    def __init__(self, timeout_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._step = -1
        self._since = 0.0
        self._given_up = False

    def must_wait(self, late: Sequence[int], *, step: int) -> bool:
        """Must the step still wait for these orders?"""
        if not late:
            return False
        now = self._clock()
        if step != self._step:
            self._step, self._since, self._given_up = step, now, False
        if now - self._since < self._timeout_s:
            return True
        if not self._given_up:
            self._given_up = True
            log.error(
                "step %d no longer waits for the groups of the orders %s, which have not come within %g s "
                "(staleness.overdue_s); see what their actors do",
                step,
                ", ".join(map(str, late)),
                self._timeout_s,
            )
        return False
