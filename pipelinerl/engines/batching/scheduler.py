"""`Scheduler`: assigns sequences to rows by priority, then first come, first served. No arrays and no clock.

    submit ─▶ waiting (bounded) ─▶ admit ─▶ running: rows 0..B-1, no holes ─▶ retire

Sequences join and leave at every decode step. The samples of a request that are admitted together share one prefill. A
sample that joins later, because the rows were full, copies the prompt's cache from a running sample of the same
request, its sibling, if the serving weights computed that cache. Samples that another engine began have different
prefixes, and are admitted one by one.

When rows end, the last rows move into the holes, so the batch stays dense; each move has a distinct source and target.

If the model's cache is paged (`CacheRoom`), sequences are admitted while their blocks fit. A running sequence may be
preempted when the blocks run out; it keeps its tokens, and is admitted again before any request that waits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, final

from inference_contract.errors import InvalidRequest, Overloaded
from pipelinerl.engines.batching.sample_loop import CacheRoom
from pipelinerl.engines.batching.sequence import Request, Sequence

#: Of this many sequences that run, one may need a further block before the next admission.
_SPARE: Final = 8


@dataclass(frozen=True, slots=True)
class Admission:
    """`sequences` of one request take `rows`. `sibling` is the row of a running sample whose cache holds the same
    prompt.
    """

    request: Request
    sequences: list[Sequence]
    rows: list[int]
    sibling: int | None


@dataclass(frozen=True, slots=True)
class Moves:
    """Rows `sources` become rows `targets`, pairwise; the two sets are disjoint."""

    sources: list[int]
    targets: list[int]


@final
@dataclass(frozen=True, slots=True)
class Capacity:
    """The number of samples that may run at once, and the number that may wait besides."""

    running: int
    waiting: int

    def check(self, samples: int, *, running: int, waiting: int) -> None:
        """Raise unless a request of `samples` samples can be queued while `running` samples run and `waiting` samples
        wait.

        Raises:
            InvalidRequest: the samples would not fit even into an idle engine, so waiting does not help.
            Overloaded: the samples do not fit now.
        """
        most = self.running + self.waiting
        if samples > most:
            raise InvalidRequest(
                f"n must be at most {most}, the {self.running} samples that run at once here and the {self.waiting} "
                f"that may wait, got {samples}",
                param="n",
            )
        if running + waiting + samples > most:
            raise Overloaded(
                f"the waiting queue holds at most {self.waiting} samples, {waiting} wait and {samples} more were "
                "requested; retry later or at another engine"
            )


@final
class Scheduler:
    """The rows and the waiting queue.

    Args:
        capacity: the samples that may run, one row each, and those that may wait beyond the free rows.
        prefill_tokens: most prompt tokens admitted at once, so that a flood of prompts cannot starve decoding; a single
            longer prompt is still admitted, alone.
    """

    def __init__(self, capacity: Capacity, prefill_tokens: int) -> None:
        self.running: list[Sequence] = []
        self.num_waiting = 0
        self._capacity = capacity
        self._prefill_tokens = prefill_tokens
        self._waiting: deque[Request] = deque()
        self._preempted: deque[Sequence] = deque()

    @property
    def any_preempted(self) -> bool:
        """True if a preempted sequence waits to run again."""
        return bool(self._preempted)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequest: the request has more samples than rows and queue together can take.
            Overloaded: the request's samples do not fit in the queue now.
        """
        samples = len(request.sequences)
        self._capacity.check(samples, running=len(self.running), waiting=self.num_waiting)
        self._waiting.insert(bisect_right(self._waiting, request.priority, key=_priority), request)
        self.num_waiting += samples

    def admit(self, room: CacheRoom | None = None, *, new: bool = True) -> list[Admission]:
        """Give free rows to preempted sequences, then, if `new`, to waiting requests: lowest `priority` first, then the
        longest waiting.

        `room` bounds the blocks that they take; the first sequence of an idle engine always fits.
        """
        admissions: list[Admission] = []
        budget, blocks = self._prefill_tokens, _Blocks(room, running=len(self.running))
        while self._preempted and len(self.running) < self._capacity.running:
            if not blocks.take(len(self._preempted[0].context), 1):
                return admissions
            sequence = self._preempted.popleft()
            budget -= len(sequence.context)
            self.num_waiting -= 1
            self.running.append(sequence)
            admissions.append(Admission(sequence.request, [sequence], [len(self.running) - 1], None))
        while new and self._waiting and len(self.running) < self._capacity.running:
            request = self._waiting[0]
            sibling = self._sibling(request) if request.started else None
            tokens = len(request.sequences[request.started].context)
            cost = tokens if sibling is None else 0
            wanted = min(self._capacity.running - len(self.running), len(request.sequences) - request.started)
            count = blocks.take(tokens, wanted if request.shares_prompt else 1)
            if count == 0 or (admissions and cost > budget):
                break
            budget -= cost
            admissions.append(self._start(request, sibling, count))
            if request.started == len(request.sequences):
                self._waiting.popleft()
        return admissions

    def preempt(self, row: int) -> Moves:
        """Make the sequence in `row` wait for room in the cache; return the moves that fill the hole."""
        self._preempted.append(self.running[row])
        self.num_waiting += 1
        return self.retire([row])

    def drop_preempted(self) -> list[Sequence]:
        """Remove and return the preempted sequences."""
        dropped = list(self._preempted)
        self._preempted.clear()
        self.num_waiting -= len(dropped)
        return dropped

    def retire(self, rows: Collection[int]) -> Moves:
        """Remove `rows` and fill the holes with the last rows."""
        kept = len(self.running) - len(rows)
        leaving = set(rows)
        targets = sorted(row for row in leaving if row < kept)
        sources = [row for row in range(kept, len(self.running)) if row not in leaving]
        for source, target in zip(sources, targets, strict=True):
            self.running[target] = self.running[source]
        del self.running[kept:]
        return Moves(sources, targets)

    def withdraw(self, request: Request) -> list[int]:
        """Drop the waiting samples of `request`; return the rows of its running samples, which the caller must
        retire.
        """
        if request.started < len(request.sequences) and request in self._waiting:
            self._waiting.remove(request)
            self.num_waiting -= len(request.sequences) - request.started
        kept = [sequence for sequence in self._preempted if sequence.request is not request]
        self.num_waiting -= len(self._preempted) - len(kept)
        self._preempted = deque(kept)
        return [row for row, sequence in enumerate(self.running) if sequence.request is request]

    def withdraw_all(self) -> list[Request]:
        """Drop everything; return every request that had not ended."""
        requests = {id(request): request for request in self._waiting}
        requests.update({id(sequence.request): sequence.request for sequence in (*self.running, *self._preempted)})
        self._waiting.clear()
        self._preempted.clear()
        self.running.clear()
        self.num_waiting = 0
        return list(requests.values())

    def _sibling(self, request: Request) -> int | None:
        if not request.shares_prompt:
            return None
        rows = enumerate(self.running)
        return next(
            (row for row, sequence in rows if sequence.request is request and sequence.prompt_cache_is_current), None
        )

    def _start(self, request: Request, sibling: int | None, count: int) -> Admission:
        first_row = len(self.running)
        sequences = request.sequences[request.started : request.started + count]
        request.started += count
        self.num_waiting -= count
        self.running.extend(sequences)
        return Admission(request, sequences, list(range(first_row, first_row + count)), sibling)


@final
class _Blocks:
    """The blocks that one call of `admit` may still give out.

    A part of them is left to the sequences that run, so that they are not preempted at once.
    """

    def __init__(self, room: CacheRoom | None, *, running: int) -> None:
        self._room, self._running = room, running
        self._free = 0 if room is None else room.free

    def take(self, tokens: int, count: int) -> int:
        """Return how many of `count` sequences, which share `tokens` tokens, fit; count their blocks as given out."""
        if self._room is None:
            return count
        shared = (tokens - 1) // self._room.size
        for several in range(count, 0, -1):
            spare = (self._running + several) // _SPARE if self._running else 0
            if shared + several + spare <= self._free:
                self._free -= shared + several
                self._running += several
                return several
        return 0


def _priority(request: Request) -> int:
    return request.priority
