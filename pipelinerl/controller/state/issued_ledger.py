"""The controller's side of the ledger: every order issued is trained, filtered, stale, failed or in flight.

The trainer's account (frontier and counts) is authoritative for what it consumed, since it is part of its checkpoint;
the controller adds what it issued and what failed. `check` asserts the balance: it is never only hoped for.
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
    """Orders by index; `cursor` is the next index never issued."""

    cursor: int = 0
    reissue: list[int] = field(default_factory=list)
    """Indices below the cursor that nobody works on and that are to be issued again; ascending."""
    failed: set[int] = field(default_factory=set)
    """Orders that failed: all of them, since a trainer that goes on from a checkpoint may have to be told again."""
    outdated: set[int] = field(default_factory=set)
    """Orders that an actor gave up, since their groups would have been stale; all of them, likewise."""
    consumed: ConsumedReport = field(default_factory=ConsumedReport)
    sizes: dict[int, int] = field(default_factory=dict)
    """How many rollouts each order that is in flight asks for."""

    @property
    def ended(self) -> int:
        """Orders that the trainer accounts for."""
        return self.consumed.trained + self.consumed.filtered + self.consumed.stale + self.consumed.failed

    @property
    def in_flight(self) -> int:
        """Orders issued and not ended."""
        return self.cursor - len(self.reissue) - self.ended - len(self.unsettled) - len(self.unsettled_stale)

    @property
    def unsettled(self) -> list[int]:
        """Orders that failed and that the trainer has not taken into its account yet; ascending."""
        return sorted(self._open(self.failed))

    @property
    def unsettled_stale(self) -> list[int]:
        """The same of orders that were given up as stale."""
        return sorted(self._open(self.outdated))

    @property
    def rollouts_in_flight(self) -> int:
        """Rollouts of the orders in flight."""
        return sum(self.sizes.values())

    def note_size(self, index: int, rollouts: int) -> None:
        """Order `index`, which was just issued, asks for so many."""
        self.sizes[index] = rollouts

    def next_index(self) -> int:
        """Issue the next order: its index."""
        if self.reissue:
            return self.reissue.pop(0)
        self.cursor += 1
        return self.cursor - 1

    def fail(self, index: int) -> None:
        """The order ended without a group."""
        self._end(index, self.failed)

    def give_up(self, index: int) -> None:
        """The order ended without a group, which would have been stale."""
        self._end(index, self.outdated)

    def update(self, consumed: ConsumedReport) -> None:
        """Take the trainer's account, which says how an order that we called failed really ended.

        After a resume it may hold orders that were issued after the checkpoint, whose groups still lay in the stream.
        """
        self.consumed = consumed
        known = max(self.cursor, consumed.frontier, *(index + 1 for index in consumed.beyond))
        if self.reissue or known > self.cursor:
            self.reissue = self._open([*self.reissue, *range(self.cursor, known)])
            self.cursor = known
        self.sizes = {index: self.sizes[index] for index in self._open(self.sizes)}
        self.check()

    def lost(self, indices: Iterable[int]) -> list[int]:
        """Orders without a group to come: those of them that are in flight are to be issued again, and returned."""
        known = {*self.reissue, *self.failed, *self.outdated}
        again = self._open([index for index in indices if index < self.cursor and index not in known])
        self.reissue = sorted({*self.reissue, *again})
        for index in again:
            self.sizes.pop(index, None)
        return again

    def check(self) -> None:
        """Raises LedgerError when the account does not balance."""
        if self.in_flight < 0:
            raise LedgerError(
                f"issued {self.cursor - len(self.reissue)} orders but {self.ended} ended, {len(self.unsettled)} more "
                f"failed and {len(self.unsettled_stale)} more were given up: the account does not balance; keep the "
                "run directory and report it"
            )

    def to_record(self) -> dict[str, Any]:
        """Plain values for a snapshot."""
        return {
            "cursor": self.cursor,
            "failed": sorted(self.failed),
            "reissue": list(self.reissue),
            "outdated": sorted(self.outdated),
        }

    @classmethod
    def resume(cls, record: dict[str, Any], consumed: ConsumedReport) -> Self:
        """The account after a restart of everything: whatever was in flight is to be issued again."""
        account = cls(
            cursor=int(record["cursor"]),
            failed=set(record["failed"]),
            outdated=set(record.get("outdated", ())),
            consumed=consumed,
        )
        account.lost(range(consumed.frontier, account.cursor))
        return account

    def ledger(self) -> dict[str, int]:
        """The balance, by fate."""
        return {
            "issued": self.cursor - len(self.reissue),
            "trained": self.consumed.trained,
            "filtered": self.consumed.filtered,
            "stale": len(self.unsettled_stale) + self.consumed.stale,
            "failed": len(self.unsettled) + self.consumed.failed,
            "in_flight": self.in_flight,
        }

    def _open(self, indices: Iterable[int]) -> list[int]:
        """Those that the trainer does not account for."""
        frontier, beyond = self.consumed.frontier, set(self.consumed.beyond)
        return [index for index in indices if index >= frontier and index not in beyond]  # `has_ended`, of thousands

    def _end(self, index: int, fate: set[int]) -> None:
        """An order ends once, whoever says so first."""
        is_consumed = has_ended(index, self.consumed.frontier, self.consumed.beyond)
        if index < self.cursor and not (is_consumed or index in self.failed or index in self.outdated):
            fate.add(index)
            self.sizes.pop(index, None)
            if index in self.reissue:
                self.reissue.remove(index)
