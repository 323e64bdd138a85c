"""The controller's ledger of orders (requests for a group): each is trained, filtered, stale, failed or in flight.

The trainer's account (`ConsumedReport`) is authoritative for the orders that the trainer consumed, since it is part of
the trainer's checkpoint. It holds counts by outcome, and a frontier: all orders below this index have ended. The ledger
also records which orders the controller issued, and which orders were reported by actors as failed or stale. `check`
raises an error if more orders ended than were issued.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

import msgspec

from pipelinerl.errors import LedgerError
from pipelinerl.messages import ConsumedReport, has_ended
from pipelinerl.types import IssuedAt


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

    def withdraw(self, version: int) -> None:
        """Mark orders issued after `version` as withdrawn: the trainer that begins there will drop their groups."""
        self.withdrawn |= {index for index, each in self.sent.items() if each.issued_at.version > version}

    def next_index(self) -> int:
        """Issue an order and return its index: an order to be reissued if there is any, otherwise a new order."""
        if self.reissue:
            return self.reissue.pop(0)
        self.cursor += 1
        return self.cursor - 1

    def fail(self, index: int, issued_at: tuple[int, int] | None = None, *, is_stale: bool = False) -> None:
        """End the order as failed, or as stale if its actor gave it up; reissue it instead if it is withdrawn.

        Do nothing if the order was issued again after `issued_at`, the issue that the report concerns.
        """
        sent = self.sent.get(index)
        superseded = index in self.reissue if sent is None else issued_at is not None and sent.issued_at > issued_at
        if superseded or self.lost(self.withdrawn & {index}):
            return
        is_consumed = has_ended(index, self.consumed.frontier, self.consumed.beyond)
        if index < self.cursor and not (is_consumed or index in self.failed or index in self.outdated):
            (self.outdated if is_stale else self.failed).add(index)
            self.sent.pop(index, None)

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
