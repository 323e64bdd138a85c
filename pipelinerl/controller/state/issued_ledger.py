"""The controller's ledger of orders (requests for a group): each is trained, filtered, stale, failed or in flight.

The trainer's account (`ConsumedReport`) is authoritative for the orders that the trainer consumed, since it is part of
the trainer's checkpoint. It holds counts by outcome, and a frontier: all orders below this index have ended. The ledger
also records which orders the controller issued, and which orders were reported by actors as failed or stale. `check`
raises an error if more orders ended than were issued.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

import msgspec

from pipelinerl.errors import LedgerError
from pipelinerl.messages import ConsumedReport, has_ended
from pipelinerl.types import IssuedAt, PromptOrder


class SentOrder(NamedTuple):
    """An order in flight: its number of rollouts, and the trainer's epoch and version when it was last issued."""

    rollouts: int
    issued_at: IssuedAt


@dataclass(slots=True)
class IssuedLedger:
    """Tracks the outcome of every prompt order, by index; `cursor` is the lowest index that was never issued."""

    cursor: int = 0
    reissue: list[int] = field(default_factory=list)
    """Indices below the cursor that must be issued again, because no actor works on them; ascending."""
    failed: set[int] = field(default_factory=set)
    """All orders that failed. They are kept, since a trainer resumed from a checkpoint may not have counted them."""
    outdated: set[int] = field(default_factory=set)
    """All orders that an actor gave up because their groups would have been stale; kept like `failed`."""
    consumed: ConsumedReport = field(default_factory=ConsumedReport)
    sent: dict[int, SentOrder] = field(default_factory=dict)
    """The orders in flight by index, except those whose groups a trainer consumed before it died without saving."""
    withdrawn: set[int] = field(default_factory=set)
    """Orders in flight whose groups the trainer will drop: they were issued for steps that were lost with a trainer."""

    @property
    def ended(self) -> int:
        """The number of orders that have ended, as counted by the trainer (`consumed`)."""
        return self.consumed.trained + self.consumed.filtered + self.consumed.stale + self.consumed.failed

    @property
    def in_flight(self) -> int:
        """The number of orders that were issued and have not ended."""
        return self.cursor - len(self.reissue) - self.ended - len(self.unsettled) - len(self.unsettled_stale)

    @property
    def unsettled(self) -> list[int]:
        """Indices of failed orders that the trainer has not counted as ended yet, ascending."""
        return sorted(self._open(self.failed))

    @property
    def unsettled_stale(self) -> list[int]:
        """Indices of orders that actors gave up as stale and the trainer has not counted as ended yet, ascending."""
        return sorted(self._open(self.outdated))

    def rollouts_in_flight(self, group_size: int) -> int:
        """Return the number of rollouts of all orders in flight; orders of unknown size count as `group_size`."""
        known = sum(each.rollouts for each in self.sent.values())
        return known + (self.in_flight - len(self.sent)) * group_size

    def note_sent(self, order: PromptOrder) -> None:
        """Record a newly issued order."""
        self.sent[order.index] = SentOrder(order.sampling.num_samples, order.issued_at)

    def withdraw(self, version: int) -> None:
        """Mark as withdrawn the orders in flight that were issued after `version`, at which a new trainer begins.

        They were issued for steps that were lost with the last trainer; the new trainer will drop their groups.
        """
        self.withdrawn |= {index for index, each in self.sent.items() if each.issued_at.version > version}

    def next_index(self) -> int:
        """Issue an order and return its index: an order to be reissued if there is any, otherwise a new order."""
        if self.reissue:
            return self.reissue.pop(0)
        self.cursor += 1
        return self.cursor - 1

    def fail(self, index: int, issued_at: tuple[int, int] | None = None) -> None:
        """End the order as failed; reissue it instead if it is withdrawn (the trainer would drop its group).

        Do nothing if the order was issued again after `issued_at`, the issue that the failure report concerns.
        """
        self._end(index, self.failed, issued_at)

    def give_up(self, index: int, issued_at: tuple[int, int] | None = None) -> None:
        """End the order as stale, as its actor gave it up; reissue it or do nothing in the same cases as `fail`."""
        self._end(index, self.outdated, issued_at)

    def update(self, consumed: ConsumedReport) -> None:
        """Replace the trainer's counts of ended orders by newer ones, which override reports of failed orders."""
        # After a resume, the account may include orders issued after the checkpoint: their groups were still in the
        # stream.
        self.consumed = consumed
        known = max(self.cursor, consumed.frontier, *(index + 1 for index in consumed.beyond))
        if self.reissue or known > self.cursor:
            self.reissue = self._open([*self.reissue, *range(self.cursor, known)])
            self.cursor = known
        self.sent = {index: self.sent[index] for index in self._open(self.sent)}
        self.withdrawn &= self.sent.keys()
        self.check()

    def lost(self, indices: Iterable[int]) -> list[int]:
        """Mark the orders in flight among `indices` as lost, so that they are issued again; return these orders."""
        known = {*self.reissue, *self.failed, *self.outdated}
        again = self._open([index for index in indices if index < self.cursor and index not in known])
        self.reissue = sorted({*self.reissue, *again})
        for index in again:
            self.sent.pop(index, None)
            self.withdrawn.discard(index)
        return again

    def check(self) -> None:
        """Raise LedgerError if more orders ended than were issued."""
        if self.in_flight < 0:
            raise LedgerError(
                f"issued {self.cursor - len(self.reissue)} orders but {self.ended} ended, {len(self.unsettled)} more "
                f"failed and {len(self.unsettled_stale)} more were given up: the account does not balance; keep the "
                "run directory and report it"
            )

    def to_record(self) -> dict[str, Any]:
        """Return the ledger as plain values, for a snapshot."""
        return {
            "cursor": self.cursor,
            "failed": sorted(self.failed),
            "reissue": list(self.reissue),
            "outdated": sorted(self.outdated),
        }

    @classmethod
    def resume(cls, record: dict[str, Any], consumed: ConsumedReport) -> Self:
        """Restore the ledger when the whole run is resumed: all orders that were in flight will be issued again."""
        account = cls(
            cursor=int(record["cursor"]),
            failed=set(record["failed"]),
            outdated=set(record.get("outdated", ())),
            consumed=consumed,
        )
        account.lost(range(consumed.frontier, account.cursor))
        return account

    def ledger(self) -> dict[str, int]:
        """Return the number of orders by outcome."""
        return {
            "issued": self.cursor - len(self.reissue),
            "trained": self.consumed.trained,
            "filtered": self.consumed.filtered,
            "stale": len(self.unsettled_stale) + self.consumed.stale,
            "failed": len(self.unsettled) + self.consumed.failed,
            "in_flight": self.in_flight,
        }

    def _open(self, indices: Iterable[int]) -> list[int]:
        frontier, beyond = self.consumed.frontier, set(self.consumed.beyond)
        # Equivalent to calling `has_ended` for each index, but faster.
        return [index for index in indices if index >= frontier and index not in beyond]

    def _end(self, index: int, outcome: set[int], issued_at: tuple[int, int] | None) -> None:
        sent = self.sent.get(index)
        superseded = index in self.reissue if sent is None else issued_at is not None and sent.issued_at > issued_at
        if superseded or self.lost(self.withdrawn & {index}):
            return
        is_consumed = has_ended(index, self.consumed.frontier, self.consumed.beyond)
        if index < self.cursor and not (is_consumed or index in self.failed or index in self.outdated):
            outcome.add(index)
            self.sent.pop(index, None)


#: The least price of one more version of lag, as a share of a step: waits below it are left alone.
LEAST_PRICE: Final = 0.03
#: Observed steps before the number grows, and before it shrinks.
_STEPS_TO_GROW: Final = 2
_STEPS_TO_SHRINK: Final = 4
#: Half-life of the estimated cost of lag, in steps.
_COST_HALF_LIFE: Final = 8
#: A policy term or weight with a truncated or clipped ratio loses this many times 1 − ESS of a step per version of lag
#: (fits to recorded runs: 1.1 to 3.9).
LOSS_PER_ESS: Final = 1.5


class StepsAhead(msgspec.Struct, kw_only=True):
    """The number A of steps whose rollouts are kept in flight: as many as pay for themselves.

    More let the trainer wait less, and make rollouts older. The least number is two: the step that trains and the next
    one. After each change, the orders that it caused need about A steps to be trained, so the rule rests for 0.8 A
    steps and then looks at new ones. As long as it has only grown since the run began, it rests for A/4 steps:

        queue longer than ¾ of a step                A shrinks: orders would only age, whichever part is slow later
        trainer waits for more than the price p      A − 1 grows by 1 / (1 − excess), unless orders queue in engines
        groups left over in each of four steps       A shrinks by the fewest groups left over
        waits below p/2 where lag is dear            A shrinks by a tenth

    The price p of one more version follows the cost c of a version of lag, as a share of a step's learning. c is
    estimated from the effective sample size (ESS) of the importance weights and the mean age of the trained tokens.
    Without importance weights, ESS cannot show what lag costs; then p stays at its least.
    """

    steps: float = 2.0
    cost: float = 0.01
    """c: the share of a step's learning that one version of lag costs."""
    rest: int = 0
    """Steps that are not looked at, since their orders were issued before the last change."""
    waited: list[float] = []
    """The trainer's wait for each observed step, divided by the step's duration, without each trainer's first step."""
    left_over: list[float] = []
    """For each observed step, the complete groups that it left over, divided by the groups per step."""
    cold: bool = True
    """True until four steps in a row gave no reason to grow."""
    any_trained: bool = False
    """True once the current trainer has taken a step."""

    @property
    def price(self) -> float:
        """The share of a step that the trainer may wait before one more step in flight pays."""
        return max(LEAST_PRICE, self.cost / max(0.2, 1 - self.cost * (self.steps - 1)))

    def note_step(
        self,
        *,
        left_over: float,
        waited: float,
        most: float,
        queued: float = 0.0,
        ess: float | None = None,
        age: float | None = None,
    ) -> None:
        """Adapt `steps`, at most to `most`, after a step.

        Args:
            left_over: the groups that the step left over, divided by the groups per step.
            waited: the trainer's wait, divided by the step's duration.
            queued: the fewest rollouts at any time of the step that no engine had begun, divided by those of a step.
            ess: effective sample size of the step's importance weights, from 0 to 1; None without such weights.
            age: mean staleness of the step's tokens in versions, 1 on policy; None if unknown.
        """
        if not self.any_trained:  # the first step waited for everything to start
            self.any_trained = True
            return
        if ess is not None and age is not None and age > 1.2:
            cost = LOSS_PER_ESS * (1 - ess) / max(age - 1, 0.5)
            self.cost += (1 - 0.5 ** (1 / _COST_HALF_LIFE)) * (cost - self.cost)
        if self.rest > 0:
            self.rest -= 1
            return
        self.waited.append(min(waited, 1.0))
        self.left_over.append(left_over)
        seen, before = len(self.waited), self.steps
        wait = sum(self.waited) / seen
        most = min(most, max(2.0, (1 + self.cost) / (2 * self.cost)))
        if queued > 0.75:
            self.steps -= min(0.5, queued - 0.5)
        elif wait > self.price and queued <= 0.25 and seen >= (1 if self.cold else _STEPS_TO_GROW):
            self.steps = 1 + (self.steps - 1) / (1 - min(0.5, wait - self.price))
        elif seen >= _STEPS_TO_SHRINK:
            self.cold = False
            is_dear = self.price > LEAST_PRICE and wait < self.price / 2
            self.steps -= max(min(self.left_over), 0.1 if is_dear else 0.0)
            self.waited, self.left_over = [], []
        self.steps = max(2.0, min(self.steps, most))
        if self.steps != before:
            self.rest, self.waited, self.left_over = math.ceil((0.25 if self.cold else 0.8) * self.steps), [], []


#: Half-life of the decayed counts of trained and filtered orders, in orders.
HALF_LIFE: Final = 128.0
#: The initial estimate, that no order is filtered, counts as much as this number of observed orders.
PRIOR: Final = 8.0


class FilteredShare(msgspec.Struct, kw_only=True):
    """Decayed counts of orders whose groups were trained, and of orders whose groups were filtered."""

    trained: float = 0.0
    filtered: float = 0.0

    @property
    def share(self) -> float:
        """The expected share of future orders that will be filtered; below 1."""
        return self.filtered / (self.trained + self.filtered + PRIOR)

    def note_step(self, *, trained: int, filtered: int) -> None:
        """Decay the counts, and add the numbers of orders that were trained or filtered in the newest step."""
        kept = 0.5 ** ((trained + filtered) / HALF_LIFE)
        self.trained = self.trained * kept + trained
        self.filtered = self.filtered * kept + filtered

    def expected(self, orders: int, *, waiting: int, most: float) -> int:
        """Return how many of `orders` orders are expected to be trained, and not filtered.

        Of these orders, `waiting` already have groups that passed the filter. At least 1 / `most` of the other orders
        are expected to be trained, since no more than `most` orders are issued for each order that is trained.
        """
        passed = min(waiting, orders)
        return passed + int((orders - passed) * max(1.0 - self.share, 1.0 / most))
