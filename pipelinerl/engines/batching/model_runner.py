"""Rows of a decode step: `ModelRunner` computes them, `Scheduler` assigns sequences to them.

`ModelRunner` is the only interface between batching and arrays; torch, numpy and JAX each implement it once. A row is
one sequence: its KV cache, the token to feed next, and its sampling parameters. Rows in use are always 0..B-1 without
holes, so one decode step is one dense batch of B rows. Only `decode` samples. `prefill` computes the cache of
everything *before* a row's next token, and the row then joins the next step. `prefill` is used for new prompts, for
samples that start later than the rest of their group, and for recomputation after a weight update. All calls come from
one thread, except `staging` and `finish_staging`, which any thread may call.

The scheduler works by priority, then first come, first served. It has no arrays and no clock.

    submit ─▶ waiting (bounded) ─▶ admit ─▶ running: rows 0..B-1, no holes ─▶ retire

Sequences leave at every decode step, and join when `Gathering` says. Samples of a request that are admitted together
share one prefill. A sample that joins later, because the rows were full, copies the prompt's cache from a running
sample of the same request, its sibling, if the serving weights computed that cache. Samples that another engine began
have different prefixes, and are admitted one by one. When rows end, the last rows move into the holes.

If the model's cache is paged (`CacheRoom`), sequences are admitted while their blocks fit. A running sequence may be
preempted when the blocks run out; it keeps its tokens, and is admitted again before any request that waits.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Mapping, Sequence as Items
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from inference_contract.errors import InvalidRequest, Overloaded
from pipelinerl import rng
from pipelinerl.engines.batching.logit_changes import LogitChange, LogitChanges
from pipelinerl.engines.batching.sample_loop import CacheRoom, ServedModel
from pipelinerl.engines.batching.sequence import Request, Sequence, TopTokens
from trainer_contract.types import Experts


@dataclass(frozen=True, slots=True)
class Prefill:
    """Request to compute the cache of `token_ids`, at positions 0, 1, …, once and to copy it to each of `rows`."""

    token_ids: Items[int]
    rows: Items[int]


@dataclass(frozen=True, slots=True)
class RowState:
    """The next token and the sampling parameters of a row.

    Attributes:
        token_id: fed at the next step, at `position`; the cache holds everything before it.
        noise_key: u64 key of the row's noise; `pipelinerl.rng.uniform(noise_key, t)` samples token t of the answer.
        num_sampled: the number of tokens of the answer that are already sampled: the t of the next token.
        temperature: 0 is greedy. 0 in top_k, 1 in top_p and 0 in min_p keep every token.
        policy_logprobs: report log-probs from before top_k, top_p and min_p.
        num_top: the number of likeliest tokens to report.
        sampled: the tokens of the answer that are already sampled.
    """

    row: int
    token_id: int
    position: int
    noise_key: int
    temperature: float
    top_p: float
    top_k: int
    num_sampled: int = 0
    min_p: float = 0.0
    policy_logprobs: bool = False
    num_top: int = 0
    change: LogitChange | None = None
    sampled: Items[int] = ()


class FurtherToken(NamedTuple):
    """A row's further token of a step; `top` are the likeliest tokens, `routed` the experts of the token before it."""

    token_id: int
    logprob: float
    top: TopTokens | None = None
    routed: Experts | None = None


#: The value of `ModelRunner.further` after a step that sampled one token per row.
NOTHING_FURTHER: Final[Mapping[int, Items[FurtherToken]]] = MappingProxyType({})


class EarlyStep:
    """The decode step that a runner starts early: while the tokens of the last step are not on the host yet.

    The device then computes this step while the host records and delivers the tokens of the last one. The loop sets
    `allowed` before each `decode`: True permits the runner to start the step after it as well. Until another `decode`
    has returned the tokens of the started step, rows may end and move. Any other change of rows, cache or weights
    discards the step, and the next `decode` computes it again. `is_used` is False if an early start saves no time.
    """

    def __init__(self, rows: int, *, is_used: bool) -> None:
        self.is_used = is_used
        self.allowed = False
        self._step: Any = None
        self._rows = np.arange(rows)
        self._moved = False

    @property
    def started(self) -> bool:
        """True if a step has started whose tokens no `decode` has returned."""
        return self._step is not None

    def keep(self, step: Any) -> None:
        """Keep `step`, which the runner has just started, for the next `decode`."""
        self._step, self._moved = step, False
        self._rows[:] = np.arange(len(self._rows))

    def move(self, sources: Items[int], targets: Items[int]) -> None:
        """Record that rows `sources` became rows `targets`, pairwise, after the step had started."""
        self._rows[list(targets)] = self._rows[list(sources)]
        self._moved = True

    def take(self, num_rows: int) -> tuple[Any, NDArray[np.int64] | None]:
        """Remove the started step; return it, and the numbers that rows 0..num_rows-1 had when it started.

        The step is None if none has started. The numbers are None if no row has moved since.
        """
        step, self._step = self._step, None
        return step, self._rows[:num_rows] if step is not None and self._moved else None

    def drop(self) -> None:
        """Discard the started step, if there is one."""
        self._step = None


class ModelRunner(ServedModel, Protocol):
    """A model with room for `slots` sequences, one per row, of at most `context_length` tokens each."""

    @property
    def early_step(self) -> EarlyStep:
        """The step that the runner may start early."""
        ...

    @property
    def top_logprobs(self) -> Mapping[int, TopTokens]:
        """The likeliest tokens of the last step, by row; only rows that report likeliest tokens have an entry."""
        ...

    @property
    def further(self) -> Mapping[int, Items[FurtherToken]]:
        """The tokens that the last step sampled beyond the first of each row, by row; empty without speculation."""
        ...

    def reserve(self, num_rows: int) -> bool:
        """Make room for the next token of rows 0..num_rows-1; return False if a row must be preempted first."""
        ...

    def release(self, rows: Items[int]) -> None:
        """Free the cache of `rows`, which have ended; called before `move`."""
        ...

    def clear(self, rows: Items[int]) -> None:
        """Overwrite what only `rows` use of the cache with finite numbers: masked NaNs spoil attention, because
        0 · NaN is NaN. Nothing that `rows` computed is reused.
        """
        ...

    def survives(self, error: Exception) -> bool:
        """Return True if, after a `prefill` or `decode` that raised `error`, the cache of other rows is intact."""
        ...

    def prefill(self, prefills: Items[Prefill]) -> None:
        """Fill the cache of the rows that `prefills` name; the tokens that these rows feed next do not change."""
        ...

    def copy_cache(self, source: int, rows: Items[int], num_tokens: int) -> None:
        """Copy the first `num_tokens` of the cache of row `source` to each of `rows`."""
        ...

    def place(self, states: Items[RowState]) -> None:
        """Set the next token and the sampling parameters of the rows that `states` name."""
        ...

    def move(self, sources: Items[int], targets: Items[int]) -> None:
        """Move rows `sources` with all their state to rows `targets`, pairwise; no row is in both."""
        ...

    def decode(self, num_rows: int) -> tuple[list[int], list[float]]:
        """Run one step of rows 0..num_rows-1; return the sampled token ids and their log-probs.

        A runner that speculates may sample further tokens of a row: `further` has them. The log-probs are those of the
        distribution sampled from. Each row feeds its last sampled token at the next step. A row whose logits contain
        NaN or +inf gets a NaN log-prob and an arbitrary token; the other rows are unaffected.
        """
        ...

    def swap(self) -> None:
        """Make the staged weights current, in constant time. Afterwards, the previous weights may be overwritten."""
        ...


def top_tokens(token_ids: NDArray[Any], logprobs: NDArray[Any], count: int) -> TopTokens:
    """Return the first `count` tokens of a row with non-zero probability; `token_ids` [N] are likeliest first."""
    pairs = zip(token_ids[:count].tolist(), logprobs[:count].tolist(), strict=True)
    return [(token_id, logprob) for token_id, logprob in pairs if logprob > -math.inf]


class RowTable:
    """The fields of all `RowState`s as arrays [rows] on the host; `ids` is the dtype of token ids and positions."""

    def __init__(self, rows: int, *, ids: DTypeLike = np.int64) -> None:
        self.feeds: NDArray[Any] = np.zeros(rows, dtype=ids)
        self.positions: NDArray[Any] = np.zeros(rows, dtype=ids)
        self.temperature = np.ones(rows, dtype=np.float32)
        self.top_p = np.ones(rows, dtype=np.float32)
        self.top_k: NDArray[Any] = np.zeros(rows, dtype=ids)
        self.min_p = np.zeros(rows, dtype=np.float32)
        self.policy_logprobs = np.zeros(rows, dtype=bool)
        self.num_top = np.zeros(rows, dtype=np.int64)
        self.changes = LogitChanges()
        self._has_extras = False
        self.any_change = False
        """True if a row may change a logit, as of the last `place`."""
        self.any_min_p = False
        """True if a row has a `min_p`, as of the last `place`."""
        self.most_top = 0
        """The largest `num_top`, as of the last `place`."""
        self._num_sampled = np.zeros(rows, dtype=np.int64)
        self._noise_keys = np.zeros(rows, dtype=np.uint64)

    def place(self, states: Items[RowState]) -> None:
        """Set the next token and the sampling parameters of the rows that `states` name."""
        rows = [state.row for state in states]
        self.feeds[rows] = [state.token_id for state in states]
        self.positions[rows] = [state.position for state in states]
        self.temperature[rows] = [state.temperature for state in states]
        self.top_p[rows] = [state.top_p for state in states]
        self.top_k[rows] = [state.top_k for state in states]
        self._num_sampled[rows] = [state.num_sampled for state in states]
        self._noise_keys[rows] = [state.noise_key for state in states]
        self.policy_logprobs[rows] = [state.policy_logprobs for state in states]
        if not self._has_extras and not any(state.min_p or state.num_top or state.change for state in states):
            return
        self.min_p[rows] = [state.min_p for state in states]
        self.num_top[rows] = [state.num_top for state in states]
        self.any_min_p, self.most_top = bool(self.min_p.any()), int(self.num_top.max())
        for state in states:
            self.changes.place(state.row, state.change, state.sampled)
        self.any_change = bool(self.changes)
        self._has_extras = self.any_change or self.any_min_p or self.most_top > 0

    def move(self, sources: Items[int], targets: Items[int]) -> int:
        """Move rows `sources` to rows `targets`, pairwise; return the longest cache length among the moved rows."""
        taken, put = list(sources), list(targets)
        columns = [self.feeds, self.positions, self.temperature, self.top_p, self.top_k, self.policy_logprobs]
        columns += [self._num_sampled, self._noise_keys, self.min_p, self.num_top]
        for column in columns:
            column[put] = column[taken]
        self.changes.move(taken, put)
        return int(self.positions[put].max())

    def noise(self, rows: slice | NDArray[np.int64], *, skipped: int | NDArray[np.int64] = 0) -> NDArray[np.float64]:
        """Return the noise in [0, 1) with which `rows` sample their next token, or the token `skipped` tokens later."""
        return rng.uniform(self._noise_keys[rows], self._num_sampled[rows] + skipped)

    def keep_whole(self, rows: slice | NDArray[np.int64]) -> bool:
        """Return True if `rows` need no truncation, and no row at all changes logits or reports likeliest tokens."""
        truncates = self.any_min_p or bool((self.top_k[rows] > 0).any() or (self.top_p[rows] < 1).any())
        return not (truncates or self.any_change or self.most_top)

    def advance(self, rows: slice, sampled: NDArray[Any], drafted: Items[Items[int]] = ()) -> None:
        """Advance `rows`: each feeds its token in `sampled` next, after those that it `drafted` in the same step."""
        count = np.array([1 + len(each) for each in drafted]) if drafted else 1
        self.feeds[rows] = sampled
        self.positions[rows] += count
        self._num_sampled[rows] += count
        if self.any_change:
            every = zip(drafted, sampled.tolist(), strict=True)
            self.changes.count([[*before, last] for before, last in every] if drafted else sampled)

    def top_of(
        self, token_ids: NDArray[Any], logprobs: NDArray[Any], rows: NDArray[np.int64] | None = None
    ) -> dict[int, TopTokens]:
        """Return the likeliest tokens [B, most_top] by place in `rows`, by default by row, if the row reports any."""
        wanted = self.num_top[: len(token_ids)] if rows is None else self.num_top[rows]
        return {
            int(place): top_tokens(token_ids[place], logprobs[place], int(wanted[place]))
            for place in wanted.nonzero()[0]
        }

    def clear(self) -> None:
        """Reset all rows to the unused state."""
        for column in (self.feeds, self.positions, self._num_sampled):
            column[:] = 0


# --- rows and the waiting queue ---------------------------------------------------------------------------------------

#: Admission leaves one free block per this many running sequences, which may need a block in the next step.
_SPARE: Final = 8


@dataclass(frozen=True, slots=True)
class Admission:
    """Admission of one request's `sequences` to `rows`; `sibling` is a running row whose prompt can be copied."""

    request: Request
    sequences: list[Sequence]
    rows: list[int]
    sibling: int | None


@dataclass(frozen=True, slots=True)
class Moves:
    """Rows to move: the i-th of `sources` becomes the i-th of `targets`; no row is in both."""

    sources: list[int]
    targets: list[int]


@dataclass(frozen=True, slots=True)
class Capacity:
    """The number of samples that may run at once, and the number that may wait in addition."""

    running: int
    waiting: int

    def check(self, samples: int, *, running: int, waiting: int) -> None:
        """Raise `InvalidRequest` if `samples` samples could never fit, and `Overloaded` if they do not fit now."""
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


class Scheduler:
    """Assigns rows to sequences, and queues those that wait for a row.

    `prefill_tokens` is the maximum number of prompt tokens admitted at once, so that many prompts cannot starve
    decoding; a single longer prompt is admitted alone.
    """

    def __init__(self, capacity: Capacity, prefill_tokens: int) -> None:
        self.running: list[Sequence] = []
        self.num_waiting = 0
        self._capacity = capacity
        self._prefill_tokens = prefill_tokens
        self._waiting: deque[Request] = deque()
        self._preempted: deque[Sequence] = deque()
        self._out_of_blocks = False  # as of the last `admit`; rows that end may change it, and so may a new request

    @property
    def admissible(self) -> int:
        """The number of free rows that `admit` might give to sequences that wait."""
        return 0 if self._out_of_blocks else min(self.num_waiting, self._capacity.running - len(self.running))

    @property
    def any_preempted(self) -> bool:
        """True if a preempted sequence waits to run again."""
        return bool(self._preempted)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises `InvalidRequest` if it could never fit, and `Overloaded` if it does not fit now."""
        samples = len(request.sequences)
        self._capacity.check(samples, running=len(self.running), waiting=self.num_waiting)
        self._waiting.insert(bisect_right(self._waiting, request.priority, key=lambda queued: queued.priority), request)
        self.num_waiting += samples
        self._out_of_blocks = False

    def admit(self, room: CacheRoom | None = None, *, new: bool = True) -> list[Admission]:
        """Give free rows to preempted sequences and then, if `new`, to waiting requests: lowest `priority` first, then
        longest wait.

        `room` bounds the blocks that the sequences take; the first sequence of an idle engine always fits.
        """
        admissions: list[Admission] = []
        budget, blocks = self._prefill_tokens, _Blocks(room, running=len(self.running))
        while self._preempted and len(self.running) < self._capacity.running:
            if not blocks.take(len(self._preempted[0].context), 1):
                self._out_of_blocks = True
                return admissions
            sequence = self._preempted.popleft()
            budget -= len(sequence.context)
            self.num_waiting -= 1
            self.running.append(sequence)
            admissions.append(Admission(sequence.request, [sequence], [len(self.running) - 1], None))
        while new and self._waiting and len(self.running) < self._capacity.running:
            request = self._waiting[0]
            sibling = None
            if request.started and request.shares_prompt:
                same = (row for row, each in enumerate(self.running) if each.request is request)
                sibling = next((row for row in same if self.running[row].prompt_cache_is_current), None)
            tokens = len(request.sequences[request.started].context)
            cost = tokens if sibling is None else 0
            wanted = min(self._capacity.running - len(self.running), len(request.sequences) - request.started)
            count = blocks.take(tokens, wanted if request.shares_prompt else 1)
            if count == 0:
                self._out_of_blocks = True
                break
            if admissions and cost > budget:
                break
            budget -= cost
            first_row, sequences = len(self.running), request.sequences[request.started : request.started + count]
            request.started += count
            self.num_waiting -= count
            self.running.extend(sequences)
            admissions.append(Admission(request, sequences, list(range(first_row, len(self.running))), sibling))
            if request.started == len(request.sequences):
                self._waiting.popleft()
        return admissions

    def preempt(self, row: int) -> Moves:
        """Make the sequence in `row` wait for room in the cache; return the move that refills `row`, if any."""
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
        """Free `rows`, and return the moves of the last rows to them, so that rows in use have no gaps."""
        self._out_of_blocks = False
        kept = len(self.running) - len(rows)
        leaving = set(rows)
        targets = sorted(row for row in leaving if row < kept)
        sources = [row for row in range(kept, len(self.running)) if row not in leaving]
        for source, target in zip(sources, targets, strict=True):
            self.running[target] = self.running[source]
        del self.running[kept:]
        return Moves(sources, targets)

    def withdraw(self, request: Request) -> list[int]:
        """Drop the waiting samples of `request`; return the rows of its running samples, for the caller to retire."""
        if request.started < len(request.sequences) and request in self._waiting:
            self._waiting.remove(request)
            self.num_waiting -= len(request.sequences) - request.started
        kept = [sequence for sequence in self._preempted if sequence.request is not request]
        self.num_waiting -= len(self._preempted) - len(kept)
        self._preempted = deque(kept)
        return [row for row, sequence in enumerate(self.running) if sequence.request is request]

    def withdraw_all(self) -> list[Request]:
        """Drop all samples; return every request that had not ended."""
        requests = {id(request): request for request in self._waiting}
        requests.update({id(sequence.request): sequence.request for sequence in (*self.running, *self._preempted)})
        self._waiting.clear()
        self._preempted.clear()
        self.running.clear()
        self.num_waiting = 0
        return list(requests.values())


class _Blocks:
    """The blocks that one call of `admit` may give out, without those reserved for running sequences."""

    def __init__(self, room: CacheRoom | None, *, running: int) -> None:
        self._room, self._running = room, running
        self._free = 0 if room is None else room.free
        self._slots = 0 if room is None else room.free_slots

    def take(self, tokens: int, count: int) -> int:
        """Reserve blocks for up to `count` sequences that share a context of `tokens` tokens; return how many fit."""
        if self._room is None:
            return count
        shared = (tokens - 1) // self._room.size
        for several in range(count, 0, -1):
            spare = (self._running + several) // _SPARE if self._running else 0
            slots = 0 if self._room.most_slots is None else min(shared, self._room.most_slots) + several
            if shared + several + spare <= self._free and slots <= self._slots:
                self._free -= shared + several
                self._slots -= slots
                self._running += several
                return several
        return 0


#: Prefills before the first estimate, of which the first one is slow for other reasons.
_LEAST_PREFILLS: Final = 5
#: The weight of each prefill relative to the one after it.
_DECAY: Final = 0.95
#: A prefill counts as at most this many times the mean of those before: it may have compiled something.
_SLOW: Final = 3.0
#: Most steps that a free row waits, so that a wrong estimate cannot starve it.
_MOST_STEPS: Final = 64


class Gathering:
    """Measures a loop's steps and prefills, and tells when sequences that wait join the rows that run.

    A prefill delays all running rows, and part of the delay does not depend on its tokens: launches, transfers, and the
    decode step that could not start early. Answers of different lengths end one by one, so that a prefill for each
    would come at nearly every step. The loop rather leaves free rows idle until this has cost as many row-seconds as a
    prefill's fixed delay:

        Σ idle rows · seconds of a step ≥ running rows · fixed seconds of a prefill

    Total cost is least where both costs are equal, if rows end at a steady rate (economic lot size, Harris 1913).
    """

    def __init__(self) -> None:
        self._idle_s = 0.0
        self._steps = 0
        self._prefills = 0
        # Sums over prefills, weighted, of 1, tokens, seconds, tokens², tokens · seconds.
        self._sums: tuple[float, ...] = (0.0,) * 5

    @property
    def fixed_s(self) -> float:
        """The seconds of a prefill without tokens, by a line through the measured prefills; 0 if unknown."""
        count, tokens, seconds, squares, products = self._sums
        spread = count * squares - tokens * tokens
        if self._prefills < _LEAST_PREFILLS or spread <= 1e-6 * count * squares:
            return 0.0
        per_token = max(0.0, (count * products - tokens * seconds) / spread)
        return max(0.0, (seconds - per_token * tokens) / count)

    def may_join(self, running: int) -> bool:
        """Return whether sequences that wait join now, `running` rows being in use."""
        return self._steps >= _MOST_STEPS or self._idle_s >= running * self.fixed_s

    def count_step(self, seconds: float, idle: int) -> None:
        """Count a decode step, during which `idle` rows were free for sequences that wait."""
        if idle:
            self._idle_s += idle * seconds
            self._steps += 1

    def count_prefill(self, tokens: int, seconds: float) -> None:
        """Count a prefill of `tokens` tokens. Its sequences have joined, so the wait of free rows starts again."""
        self._idle_s, self._steps = 0.0, 0
        self._prefills += tokens > 0
        if tokens > 0 and self._prefills > 1:
            count, _, total, *_ = self._sums
            seconds = min(seconds, _SLOW * total / count) if count else seconds
            new = 1.0, tokens, seconds, tokens * tokens, tokens * seconds
            self._sums = tuple(_DECAY * old + each for old, each in zip(self._sums, new, strict=True))
