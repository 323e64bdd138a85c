"""The controller's side of the ledger: every order issued is trained, filtered, stale, failed or in flight.

The trainer's account (frontier and counts) is authoritative for what it consumed, since it is part of its checkpoint;
the controller adds what it issued and what failed. `check` asserts the balance: it is never only hoped for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self, final

from pipelinerl.errors import LedgerError
from pipelinerl.messages import Consumed


@final
@dataclass(slots=True)
class Account:
    """Orders by index; `cursor` is the next index never issued."""

    cursor: int = 0
    reissue: list[int] = field(default_factory=list)
    """Indices below the cursor that nobody works on and that are to be issued again; ascending."""
    failed: set[int] = field(default_factory=set)
    """Orders that failed: all of them, since a trainer that goes on from a checkpoint may have to be told again."""
    consumed: Consumed = field(default_factory=Consumed)

    @property
    def ended(self) -> int:
        """Orders that the trainer accounts for."""
        return self.consumed.trained + self.consumed.filtered + self.consumed.stale + self.consumed.failed

    @property
    def in_flight(self) -> int:
        """Orders issued and not ended."""
        return self.cursor - len(self.reissue) - self.ended - len(self.unsettled)

    @property
    def unsettled(self) -> list[int]:
        """Orders that failed and that the trainer has not taken into its account yet; ascending."""
        return self._open(sorted(self.failed))

    def next_index(self) -> int:
        """Issue the next order: its index."""
        if self.reissue:
            return self.reissue.pop(0)
        self.cursor += 1
        return self.cursor - 1

    def fail(self, index: int) -> None:
        """The order ended without a group."""
        if index < self.cursor and not self._is_consumed(index):
            self.failed.add(index)
            self.reissue = [other for other in self.reissue if other != index]

    def update(self, consumed: Consumed) -> None:
        """Take the trainer's account, which says how an order that we called failed really ended.

        After a resume it may hold orders that were issued after the checkpoint, whose groups still lay in the stream.
        """
        self.consumed = consumed
        known = max(self.cursor, consumed.frontier, *(index + 1 for index in consumed.beyond))
        if self.reissue or known > self.cursor:
            self.reissue = self._open([*self.reissue, *range(self.cursor, known)])
            self.cursor = known
        self.check()

    def lost(self, indices: Iterable[int]) -> list[int]:
        """Orders without a group to come: those of them that are in flight are to be issued again, and returned."""
        known = {*self.reissue, *self.failed}
        again = self._open([index for index in indices if index < self.cursor and index not in known])
        self.reissue = sorted({*self.reissue, *again})
        return again

    def check(self) -> None:
        """Raises LedgerError when the account does not balance."""
        if self.in_flight < 0:
            raise LedgerError(
                f"issued {self.cursor - len(self.reissue)} orders but {self.ended} ended and {len(self.unsettled)} "
                "more failed: the account does not balance; keep the run directory and report it"
            )

    def to_record(self) -> dict[str, Any]:
        """Plain values for a snapshot."""
        return {"cursor": self.cursor, "failed": sorted(self.failed), "reissue": list(self.reissue)}

    @classmethod
    def resume(cls, record: dict[str, Any], consumed: Consumed) -> Self:
        """The account after a restart of everything: whatever was in flight is to be issued again."""
        account = cls(cursor=int(record["cursor"]), failed=set(record["failed"]), consumed=consumed)
        account.lost(range(consumed.frontier, account.cursor))
        return account

    def ledger(self) -> dict[str, int]:
        """The balance, by fate."""
        return {
            "issued": self.cursor - len(self.reissue),
            "trained": self.consumed.trained,
            "filtered": self.consumed.filtered,
            "stale": self.consumed.stale,
            "failed": len(self.unsettled) + self.consumed.failed,
            "in_flight": self.in_flight,
        }

    def _open(self, indices: Iterable[int]) -> list[int]:
        """Those that the trainer does not account for."""
        beyond = set(self.consumed.beyond)
        return [index for index in indices if index >= self.consumed.frontier and index not in beyond]

    def _is_consumed(self, index: int) -> bool:
        return index < self.consumed.frontier or index in self.consumed.beyond
