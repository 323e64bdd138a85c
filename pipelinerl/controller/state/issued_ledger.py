"""The controller's ledger: every issued order is trained, filtered, stale, failed or in flight.

The trainer's account (frontier and counts) is authoritative for what it consumed, since it is part of its checkpoint.
The controller adds what it issued and what failed. `check` enforces the balance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self, final

from pipelinerl.errors import LedgerError
from pipelinerl.messages import ConsumedReport, has_ended


@final
@dataclass(slots=True)
class IssuedLedger:
    """Orders by index; `cursor` is the next index that was never issued."""

    cursor: int = 0
    reissue: list[int] = field(default_factory=list)
    """Indices below the cursor that must be issued again, because no actor works on them; ascending."""
    failed: set[int] = field(default_factory=set)
    """All orders that failed. They are kept, since a trainer that resumes from a checkpoint may need them again."""
    outdated: set[int] = field(default_factory=set)
    """All orders that an actor gave up because their groups would have been stale; kept for the same reason."""
    consumed: ConsumedReport = field(default_factory=ConsumedReport)
    sizes: dict[int, int] = field(default_factory=dict)
    """Rollouts that each order in flight asks for, by index."""

    @property
    def ended(self) -> int:
        """The number of orders that the trainer has accounted for."""
        return self.consumed.trained + self.consumed.filtered + self.consumed.stale + self.consumed.failed

    @property
    def in_flight(self) -> int:
        """The number of orders that were issued and have not ended."""
        return self.cursor - len(self.reissue) - self.ended - len(self.unsettled) - len(self.unsettled_stale)

    @property
    def unsettled(self) -> list[int]:
        """Failed orders that the trainer has not added to its account yet; ascending."""
        return sorted(self._open(self.failed))

    @property
    def unsettled_stale(self) -> list[int]:
        """Orders given up as stale that the trainer has not added to its account yet; ascending."""
        return sorted(self._open(self.outdated))

    @property
    def rollouts_in_flight(self) -> int:
        """The number of rollouts of all orders in flight."""
        return sum(self.sizes.values())

    def note_size(self, index: int, rollouts: int) -> None:
        """Record how many rollouts the newly issued order `index` asks for."""
        self.sizes[index] = rollouts

    def next_index(self) -> int:
        """Issue the next order and return its index."""
        if self.reissue:
            return self.reissue.pop(0)
        self.cursor += 1
        return self.cursor - 1

    def fail(self, index: int) -> None:
        """End the order without a group, as failed."""
        self._end(index, self.failed)

    def give_up(self, index: int) -> None:
        """End the order without a group, as stale."""
        self._end(index, self.outdated)

    def update(self, consumed: ConsumedReport) -> None:
        """Replace the trainer's account, which decides how an order really ended even if it was reported as failed.

        After a resume, the account may include orders that were issued after the checkpoint, since their groups were
        still in the stream.
        """
        self.consumed = consumed
        known = max(self.cursor, consumed.frontier, *(index + 1 for index in consumed.beyond))
        if self.reissue or known > self.cursor:
            self.reissue = self._open([*self.reissue, *range(self.cursor, known)])
            self.cursor = known
        self.sizes = {index: self.sizes[index] for index in self._open(self.sizes)}
        self.check()

    def lost(self, indices: Iterable[int]) -> list[int]:
        """Mark those of these orders that are in flight for reissue, since no group will come; return them."""
        known = {*self.reissue, *self.failed, *self.outdated}
        again = self._open([index for index in indices if index < self.cursor and index not in known])
        self.reissue = sorted({*self.reissue, *again})
        for index in again:
            self.sizes.pop(index, None)
        return again

    def check(self) -> None:
        """Check that the account balances.

        Raises:
            LedgerError: more orders ended than were issued.
        """
        if self.in_flight < 0:
            raise LedgerError(
                f"issued {self.cursor - len(self.reissue)} orders but {self.ended} ended, {len(self.unsettled)} more "
                f"failed and {len(self.unsettled_stale)} more were given up: the account does not balance; keep the "
                "run directory and report it"
            )

    def to_record(self) -> dict[str, Any]:
        """Return plain values for a snapshot."""
        return {
            "cursor": self.cursor,
            "failed": sorted(self.failed),
            "reissue": list(self.reissue),
            "outdated": sorted(self.outdated),
        }

    @classmethod
    def resume(cls, record: dict[str, Any], consumed: ConsumedReport) -> Self:
        """Restore the account after a restart of the whole run: all orders that were in flight are issued again."""
        account = cls(
            cursor=int(record["cursor"]),
            failed=set(record["failed"]),
            outdated=set(record.get("outdated", ())),
            consumed=consumed,
        )
        account.lost(range(consumed.frontier, account.cursor))
        return account

    def ledger(self) -> dict[str, int]:
        """Return the balance: the number of orders by outcome."""
        return {
            "issued": self.cursor - len(self.reissue),
            "trained": self.consumed.trained,
            "filtered": self.consumed.filtered,
            "stale": len(self.unsettled_stale) + self.consumed.stale,
            "failed": len(self.unsettled) + self.consumed.failed,
            "in_flight": self.in_flight,
        }

    def _open(self, indices: Iterable[int]) -> list[int]:
        """Keep the indices that the trainer has not accounted for."""
        frontier, beyond = self.consumed.frontier, set(self.consumed.beyond)
        return [index for index in indices if index >= frontier and index not in beyond]  # fast `has_ended`

    def _end(self, index: int, fate: set[int]) -> None:
        """End an order in one of the two ways, unless it has ended already."""
        is_consumed = has_ended(index, self.consumed.frontier, self.consumed.beyond)
        if index < self.cursor and not (is_consumed or index in self.failed or index in self.outdated):
            fate.add(index)
            self.sizes.pop(index, None)
            if index in self.reissue:
                self.reissue.remove(index)
