"""`SimulatedEngine`: rows that decode in lockstep, with one event per finished answer instead of one per token.

    submit ─▶ waiting ─▶ a row, at the next step boundary ─▶ ends after as many steps as its answer has tokens

It follows `pipelinerl/engines/batching/`: between two steps, new weights are applied first, then waiting requests get
free rows. With `on_update` `drain`, new weights wait until all rows are empty, and no request is admitted until then.
While no row joins or ends, the batch and the step time are constant, so the next event is computed directly. `plan`
returns its time; `fire` processes it. Any change between the two calls (`submit`, `commit`, `slow`) voids the plan.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from inference_contract.weights import OnUpdate
from pipelinerl.plugins.simulation.hardware import EngineTimes
from pipelinerl.staleness import StalenessBounds


@dataclass(slots=True, eq=False)
class SimulatedGroup:
    """`size` answers to one prompt. Times are in seconds since the run began."""

    index: int
    size: int
    lengths: list[int]
    issued_at: float
    place: int = -1
    """Number of the engine that samples the group; −1 while none does."""
    started: int = 0
    """Number of answers that have ended or now have a row; aborted answers, which need a new request, do not count."""
    left: int = 0
    oldest: int = -1
    """The oldest version that sampled a token of the group; −1 if no token is sampled yet."""
    versions: dict[int, int] = field(default_factory=dict)
    """Number of answers in the group that began with each version."""
    polled_version: int = -1
    """The version that the group's actor learned in its first poll after requesting the group; −1 before this poll."""
    attempts: int = 0

    @property
    def tokens(self) -> int:
        """The number of sampled tokens, once all answers have ended."""
        return sum(self.lengths)


@dataclass(slots=True)
class WaitingGroups:
    """Groups ready to train, with `rollouts` rollouts in total; `dropped` collects groups that `take` found too old.

    Groups are chosen as by `training/rollouts/batcher.py` (a test compares them): fresh groups in order of their oldest
    version, then of their index. Groups too old for the step are dropped.
    """

    rollouts: int = 0
    dropped: list[SimulatedGroup] = field(default_factory=list)
    _by_version: dict[int, list[tuple[int, SimulatedGroup]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self._by_version.values()))

    def offer(self, group: SimulatedGroup) -> None:
        """Add a group that is ready to train."""
        heapq.heappush(self._by_version.setdefault(group.oldest, []), (group.index, group))
        self.rollouts += group.size

    def take(self, rollouts: int, *, producing: int, bounds: StalenessBounds) -> list[SimulatedGroup] | None:
        """Remove and return the groups of the step that makes version `producing`; None if too few groups are fresh."""
        for version in [each for each in self._by_version if not bounds.accepts(producing=producing, oldest=each)]:
            stale = [group for _, group in sorted(self._by_version.pop(version), key=lambda each: each[0])]
            self.dropped += stale
            self.rollouts -= sum(group.size for group in stale)
        if self.rollouts < rollouts:
            return None
        chosen: list[SimulatedGroup] = []
        taken = 0
        for version in sorted(self._by_version):
            groups = self._by_version[version]
            while groups and taken < rollouts:
                chosen.append(heapq.heappop(groups)[1])
                taken += chosen[-1].size
            if not groups:
                del self._by_version[version]
            if taken >= rollouts:
                break
        self.rollouts -= taken
        return chosen


#: Tolerance for rounding errors in numbers of steps.
_SLACK: Final = 1e-9


class EngineNews(NamedTuple):
    """Changes at one step boundary of an engine: groups that ended or were aborted, and a new weight version."""

    ended: list[SimulatedGroup]
    """Groups whose last answer has ended."""
    aborted: list[SimulatedGroup]
    """Groups with answers that new weights aborted (`on_update` `abort`); each has `left` answers to request again."""
    committed: int | None
    """The version that serves from now on; None if unchanged."""


@dataclass(slots=True)
class SimulatedEngine:
    """An engine that decodes `slots` answers (rows) at once.

    `decode_steps` counts its steps so far; `row_steps` is the sum, over these steps, of the occupied rows.
    """

    times: EngineTimes
    slots: int
    on_update: OnUpdate
    pause_s: float
    prompt_tokens: int
    version: int = 0
    busy_s: float = 0.0
    decode_steps: int = 0
    row_steps: int = 0
    stamp: int = 0
    """Number of the newest plan; an event that was scheduled for an older plan is ignored."""
    _waiting: deque[SimulatedGroup] = field(default_factory=deque)
    _rows: list[tuple[int, int, int, SimulatedGroup]] = field(default_factory=list)
    """Heap of (step at whose end the row ends, serial number, step at which it began, group)."""
    _steps: int = 0
    _planned: int = 0
    _at: float = 0.0
    """Time at which step `_steps` ended, or will end."""
    _step_s: float = 0.0
    _slowness: float = 1.0
    _seen: float = 0.0
    """Time up to which `busy_s` is counted."""
    _serial: int = 0
    _commit: int | None = None

    @property
    def begun(self) -> int:
        """The number of answers that have been given a row so far, aborted ones included."""
        return self._serial

    @property
    def is_busy(self) -> bool:
        """True if any row is decoding."""
        return bool(self._rows)

    def busy_until(self, now: float) -> float:
        """Return the seconds up to `now` during which the engine had at least one row."""
        return self.busy_s + (now - self._seen if self._rows else 0.0)

    def submit(self, group: SimulatedGroup) -> None:
        """Queue a request for the unfinished answers of a group, `group.left` in number."""
        group.started = group.size - group.left
        self._waiting.append(group)

    def commit(self, version: int) -> None:
        """Receive new weights; sampling switches to them at the next step boundary that `on_update` allows."""
        self._commit = version

    def withdraw(self, group: SimulatedGroup, now: float) -> None:
        """Cancel all answers of a group and free their rows."""
        if group.started < group.size:
            self._waiting.remove(group)
        if any(row[3] is group for row in self._rows):
            self.busy_s, self._seen = self.busy_until(now), now
            self._settle(now)
            self._rows = [row for row in self._rows if row[3] is not group]
            heapq.heapify(self._rows)
            self._step_s = self._decode_s()

    def groups(self) -> list[SimulatedGroup]:
        """Return the groups of which answers wait or decode, oldest first."""
        groups = {group.index: group for group in [*self._waiting, *(row[3] for row in self._rows)]}
        return [groups[index] for index in sorted(groups)]

    def plan(self, now: float) -> float | None:
        """Return the time of the next event if nothing changes before; None if the engine is idle."""
        self.stamp += 1
        self._planned = 0
        if not self._rows:
            return max(now, self._at) if self._waiting or self._commit is not None else None
        waits_for_rows = self._commit is not None and self.on_update is OnUpdate.DRAIN
        commits = self._commit is not None and not waits_for_rows
        admits = self._commit is None and bool(self._waiting) and len(self._rows) < self.slots
        if commits or admits:
            self._planned = max(0, math.ceil((now - self._at) / self._step_s - _SLACK))
        else:
            self._planned = self._rows[0][0] - self._steps
        return self._at + self._planned * self._step_s

    def fire(self, now: float) -> EngineNews | None:
        """Process the event that `plan` announced; return ended groups and a new version, None if there is neither."""
        rows = self._rows
        if rows:
            self.busy_s += now - self._seen
            self._decoded(self._planned)
        self._seen = self._at = now
        self._planned = 0
        ended: list[SimulatedGroup] = []
        steps = self._steps
        while rows and rows[0][0] <= steps:
            group = heapq.heappop(rows)[3]
            group.left -= 1
            if group.left == 0:
                ended.append(group)
        aborted: list[SimulatedGroup] = []
        committed: int | None = None
        if self._commit is not None and not (rows and self.on_update is OnUpdate.DRAIN):
            before, self.version, committed = self.version, self._commit, self._commit
            self._commit = None
            self._at += self.pause_s
            if self.on_update is OnUpdate.ABORT:
                aborted = self._cut_short(before)
            elif self.on_update is OnUpdate.RECOMPUTE_KV:
                context = sum(self.prompt_tokens + steps - row[2] for row in rows)
                self._at += context * self.times.prompt_token_s
        if self._waiting and self._commit is None:
            self._admit()
        self._step_s = self._decode_s()
        if ended or aborted or committed is not None:
            return EngineNews(ended, aborted, committed)
        return None

    def slow(self, factor: float, now: float) -> None:
        """From now on, let decode steps, also the current one, take `factor` times as long as undisturbed ones."""
        if not self._rows:
            self._slowness = factor
            return
        self._settle(now)
        under_way, before = max(0.0, now - self._at) / self._step_s, self._step_s
        self._slowness = factor
        self._step_s = self._decode_s()
        self._at += under_way * (before - self._step_s)

    def _decode_s(self) -> float:
        return self.times.decode_s(len(self._rows)) * self._slowness

    def _settle(self, now: float) -> None:
        whole = max(0, math.floor((now - self._at) / self._step_s + _SLACK))
        self._decoded(whole)
        self._at += whole * self._step_s

    def _decoded(self, steps: int) -> None:
        self._steps += steps
        self.decode_steps += steps
        self.row_steps += steps * len(self._rows)

    def _admit(self) -> None:
        prompts = 0
        while self._waiting and len(self._rows) < self.slots:
            group = self._waiting[0]
            if group.started == group.size - group.left:
                prompts += 1
            count = min(self.slots - len(self._rows), group.size - group.started)
            if group.oldest < 0:
                group.oldest = self.version
            group.versions[self.version] = group.versions.get(self.version, 0) + count
            for length in group.lengths[group.started : group.started + count]:
                self._serial += 1
                heapq.heappush(self._rows, (self._steps + length, self._serial, self._steps, group))
            group.started += count
            if group.started == group.size:
                self._waiting.popleft()
        prefill_s = prompts * self.prompt_tokens * self.times.prompt_token_s * self._slowness
        self._at += prefill_s

    def _cut_short(self, version: int) -> list[SimulatedGroup]:
        """Abort all rows, which `version` sampled; return the groups whose aborted answers must be requested again.

        A group that still has answers in this engine's queue is left out: aborted answers join its queued request.
        """
        # Every commit aborts all rows, so all running answers were sampled by `version`, the one before this commit.
        running: dict[int, tuple[SimulatedGroup, list[int]]] = {}
        for ends, _, began, group in self._rows:
            running.setdefault(group.index, (group, []))[1].append(ends - began)
        self._rows.clear()
        waiting = {group.index for group in self._waiting}
        for group, cut in running.values():
            ended = Counter(group.lengths[: group.started]) - Counter(cut)
            group.lengths = [*ended.elements(), *cut, *group.lengths[group.started :]]
            group.started = group.size - group.left
            group.versions[version] -= len(cut)
            group.oldest = min((each for each, count in group.versions.items() if count), default=-1)
        return [group for group, _ in running.values() if group.index not in waiting]
