"""The mode `staleness.overdue = "wait"`: no step is taken that would make a group stale which is still being sampled.

Dropping stale groups favours short answers, because long answers arrive late. Each order can certainly train up to some
step, since its tokens come from weights no older than those of the engines when it was issued (the controller reports
them: `Directive.fresh_until`). Groups train in the order of issue, earliest deadline first. Before each step the
trainer checks that all outstanding orders can still train in time: for every later step d, at most (d − step) × groups
per step may be due. If not, the step waits for the outstanding ones.

| waits for | at most | who unblocks it |
|---|---|---|
| a group that is due | `overdue_s` for each step | its actor; the controller, which reports failures at once |

After that the step is taken without the group and the log names its order. If it arrives, it is stale, as with "drop".
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
    """Return outstanding orders without which `step` must not be taken; none if all of them can train in time.

    Args:
        step: the version that the step would produce.
        chosen: the orders whose groups it would train; later steps are assumed to train as many.
        waiting: the orders of all groups that have arrived.
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
    """Decides repeatedly, while a step is full, whether the step waits for other groups; at most `timeout_s` per
    step.
    """

    def __init__(self, timeout_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._step = -1
        self._since = 0.0
        self._given_up = False

    def must_wait(self, late: Sequence[int], *, step: int) -> bool:
        """Return whether the step must still wait for these orders."""
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
