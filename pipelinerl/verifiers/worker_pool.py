"""`WorkerPool`: sends questions to worker processes that may hang, and kills those that exceed a question's deadline.

A place is the right to let one question run. A pool has `workers` normal places, and further places for slow questions.
Questions about one problem form a group.

    a question that is   waits for                       at most until           and then
    new                  a normal place                  earlier ones are done   is sent to a worker
    sent                 its answer                      it counts as slow       gets a slow place and a low priority
    slow                 a slow place, then its answer   the deadline            loses its worker: `TimeoutError`

The deadline starts when a worker receives the question. A question counts as slow after four times the median processor
time (at least 20 ms), or four times the median elapsed time (at least 1 s). If all slow places are taken, the worker of
a slow question is killed, and the question is sent again once a slow place is free. Waiting groups with the fewest slow
questions come first (`FairSemaphore`). Hostile answers can therefore not delay other answers beyond their deadlines.

A question that hangs ends within the deadline plus its wait for earlier questions. Each earlier question holds a normal
place only until it is answered or counts as slow. The caller must limit the number of questions: the pool rejects none,
since that would mask honest answers.

Processes start on demand (`worker_process.py`). If a caller is cancelled while a worker has its question, that worker
is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import signal
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from pipelinerl.system.child import Child, ChildLost, Lines
from pipelinerl.system.supervised_process import descendants, ending_of, kill_all

_STARTUP_S: Final = 60.0
#: A question is slow only after this processor time, or after `_LEAST_SLOW_S` of elapsed time.
_LEAST_SLOW_CPU_S: Final = 0.02
_LEAST_SLOW_S: Final = 1.0
#: Shortest interval, in seconds, between checks of a worker's processor time.
_LEAST_LOOK_S: Final = 0.002
#: Lowest bits of the id of the clock that counts the processor time of another process (see `clock_getcpuclockid`).
_PROCESSOR_TIME_OF: Final = 2
_TIMES_THE_MEDIAN: Final = 4.0
#: The medians of the times are taken over this many latest answers.
_NEWEST: Final = 31
#: Number of places for slow questions per normal place.
_SLOW_PLACES: Final = 2
#: Nice value of workers with slow questions; on Linux it gives them a tenth of the processor share of other processes.
_LOW_PRIORITY: Final = 10
_LONGEST_ANSWER: Final = 2**24
#: Largest number of groups whose slow questions are counted; the counts are cleared when it is reached.
_REMEMBERED: Final = 1024
#: Longest wait, in seconds, for the return code of a worker that has ended.
_REPORT_S: Final = 2.0
#: Largest number of return codes that are kept.
_MOST_CODES: Final = 256


#: Result of `_answered_soon` if a question is not answered in time and therefore counts as slow.
_SLOW: Final = object()


class WorkerLost(Exception):
    """A worker could not be started, or ended before it answered."""


class Overran(TimeoutError):
    """A question was not answered within the deadline; workers spent `cpu_s` processor seconds on it."""

    def __init__(self, cpu_s: float) -> None:
        super().__init__(f"no answer within the deadline, after {cpu_s:.1f} s of processor time")
        self.cpu_s = cpu_s


#: Seconds that the current task has waited for places in pools.
_WAITED_S: Final[ContextVar[float]] = ContextVar("waited_s", default=0.0)


def stopwatch() -> Callable[[], float]:
    """Return a function that returns the seconds since this call, without those in which this task waited for a place.

    A verdict's seconds are thus those of the verifier, also if all its workers are busy.
    """
    began, waited = time.monotonic(), _WAITED_S.get()
    return lambda: time.monotonic() - began - (_WAITED_S.get() - waited)


def default_workers() -> int:
    """Return the default number of workers: one for each core that the process may use, at least two."""
    return max(2, num_cores())


def num_cores() -> int:
    """Return the number of cores that the process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerPool:
    """Worker processes that all answer with the same function.

    Args:
        target: reference to the function that returns the answering function; see `worker_process`.
        argument: argument of `target`.
        workers: maximum number of concurrent questions that are not slow; None for `default_workers`.
        deadline_s: time limit of a question.
    """

    def __init__(self, target: str, argument: str = "", *, workers: int | None = None, deadline_s: float) -> None:
        self._target = (target, argument)
        self._deadline_s = deadline_s
        size = workers or default_workers()
        self._slow_of: Counter[str] = Counter()
        self._places = FairSemaphore(size, self._slow_of)
        self._slow_places = FairSemaphore(_SLOW_PLACES * size, self._slow_of)
        self._latest_s: deque[float] = deque(maxlen=_NEWEST)
        self._latest_cpu_s: deque[float] = deque(maxlen=_NEWEST)
        self._idle: list[_Worker] = []
        self._forkers: list[_Forker] = []
        self._starting = asyncio.Lock()

    async def ask(self, question: Any, *, group: str = "") -> Any:
        """Return the answer to a JSON question; questions of one `group` have the same priority.

        Raises `Overran`, a `TimeoutError`, after the deadline, and `WorkerLost` if the process ends or cannot start.
        """
        turn = _Turn()
        try:
            asked = asyncio.get_running_loop().time()
            await turn.enter(self._places, group)
            _WAITED_S.set(_WAITED_S.get() + asyncio.get_running_loop().time() - asked)
            turn.worker = await self._ready_worker()
            began = asyncio.get_running_loop().time()
            cpu_began = turn.worker.cpu_s
            answer = await self._answered_soon(turn.worker, question)
            if answer is _SLOW:
                if len(self._slow_of) >= _REMEMBERED:
                    self._slow_of.clear()
                self._slow_of[group] += 1
                answer = await self._answered_slowly(turn, question, group, until=began + self._deadline_s)
            self._latest_s.append(asyncio.get_running_loop().time() - began)
            self._latest_cpu_s.append(max(0.0, turn.worker.cpu_s - cpu_began))
            if turn.places is self._places:
                self._idle.append(turn.worker)
                turn.worker = None
            return answer
        except TimeoutError:
            raise Overran(turn.cpu_s()) from None
        finally:
            # Kill a worker that still has the question, or whose priority was lowered.
            turn.end()

    async def start(self) -> None:
        """Start the first worker; a failure is reported by the first question."""
        with contextlib.suppress(WorkerLost, OSError, TimeoutError):
            self._idle.append(await self._ready_worker())

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().kill()
        while self._forkers:
            await self._forkers.pop().close()

    async def _answered_soon(self, worker: _Worker, question: Any) -> Any:
        clock = asyncio.get_running_loop().time
        began, cpu_began = clock(), worker.cpu_s
        slow_cpu_s = max(_LEAST_SLOW_CPU_S, _TIMES_THE_MEDIAN * median(self._latest_cpu_s or [0.0]))
        slow_s = min(self._deadline_s, max(_LEAST_SLOW_S, _TIMES_THE_MEDIAN * median(self._latest_s or [0.0])))
        sent, look_s = False, min(slow_cpu_s, slow_s)
        while True:
            try:
                async with asyncio.timeout(look_s):
                    if not sent:
                        sent = True
                        await worker.send(question)
                    return await worker.receive()
            except TimeoutError:
                left_s = slow_cpu_s - (worker.cpu_now_s() - cpu_began)
                if clock() - began >= slow_s or left_s <= 0:
                    return _SLOW
                look_s = max(_LEAST_LOOK_S, left_s)

    async def _answered_slowly(self, turn: _Turn, question: Any, group: str, *, until: float) -> Any:
        """Return the answer to a slow question.

        If no place for slow questions is free, kill the question's worker and send the question to another one later.
        """
        async with asyncio.timeout_at(until):
            if self._slow_places.take_now() and turn.worker is not None:
                turn.move(self._slow_places)
                turn.worker.lower_priority()
                return await turn.worker.receive()
            turn.end()  # kills the worker; the question is sent again when one of the places for slow questions is free
            await turn.enter(self._slow_places, group)
            turn.worker = await self._ready_worker()
            turn.worker.lower_priority()
            await turn.worker.send(question)
            return await turn.worker.receive()

    async def _ready_worker(self) -> _Worker:
        if (idle := self._idle_worker()) is not None:
            return idle
        async with self._starting:
            if (idle := self._idle_worker()) is not None:  # a worker may have become idle while this call waited
                return idle
            for forker in self._forkers:
                if forker.ended:
                    forker.kill()  # the process has ended, but this also closes our end of the connection
            self._forkers = [forker for forker in self._forkers if not forker.ended]
            if not (self._forkers and self._forkers[-1].can_give):
                self._forkers.append(await _Forker.start(*self._target))
            return await self._forkers[-1].worker()

    def _idle_worker(self) -> _Worker | None:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            worker.kill()
        return None


@dataclass(slots=True)
class _Turn:
    """The place (right to run) and the worker that one question holds now; None while it holds none."""

    places: FairSemaphore | None = None
    worker: _Worker | None = None
    _out_of_turn: bool = False
    _since: float = 0.0
    _cpu_before_s: float = 0.0

    async def enter(self, places: FairSemaphore, group: str) -> None:
        self._has(places, out_of_turn=await places.take(group))

    def move(self, places: FairSemaphore) -> None:
        """Give the current place back; hold instead the place that the caller has already taken from `places`."""
        self.leave()
        self._has(places, out_of_turn=False)

    def leave(self) -> None:
        if self.places is not None:
            self.places.give_back(time.monotonic() - self._since, out_of_turn=self._out_of_turn)
            self.places = None

    def _has(self, places: FairSemaphore, *, out_of_turn: bool) -> None:
        self.places, self._out_of_turn, self._since = places, out_of_turn, time.monotonic()

    def cpu_s(self) -> float:
        """Return the processor seconds that all workers so far have spent on this question."""
        return self._cpu_before_s + (0.0 if self.worker is None else self.worker.cpu_now_s() - self.worker.cpu_s)

    def end(self) -> None:
        if self.worker is not None:
            self._cpu_before_s = self.cpu_s()
            self.worker.kill()
            self.worker = None
        self.leave()


class _Worker:
    def __init__(self, lines: Lines, forker: _Forker) -> None:
        self._lines = lines
        self._forker = forker
        self._pid = 0
        self.cpu_s = 0.0
        """Processor seconds of the worker at its latest answer."""

    @classmethod
    async def begin(cls, connection: socket.socket, forker: _Forker) -> _Worker:
        worker = cls(await Lines.open(connection, most_bytes=_LONGEST_ANSWER), forker)
        try:
            async with asyncio.timeout(_STARTUP_S):
                worker._pid = await worker.receive()
        except BaseException:
            worker._lines.close()
            raise
        return worker

    @property
    def alive(self) -> bool:
        return self._lines.is_open

    async def send(self, question: Any) -> None:
        """Send a question; if this call is cancelled, the rest of the question is sent in the background.

        Questions are encoded only now. Until then, all waiting questions about one problem share its text in memory,
        which may have megabytes.
        """
        try:
            await self._lines.send(question)
        except OSError as error:
            raise WorkerLost(await self._forker.why_ended(self._pid)) from error

    async def receive(self) -> Any:
        try:
            received = await self._lines.receive()
            if isinstance(received, dict):
                raise WorkerLost(f"the verifier failed: {received['error']}")
            answer, self.cpu_s = received
        except EOFError:
            raise WorkerLost(await self._forker.why_ended(self._pid)) from None
        except (ValueError, TypeError, KeyError) as error:
            raise WorkerLost(
                f"the verifier's process sent a line that is no answer, or has more than {_LONGEST_ANSWER} bytes"
            ) from error
        return answer

    def cpu_now_s(self) -> float:
        """Return the processor seconds of the worker so far; infinite if unknown."""
        try:
            return time.clock_gettime(~self._pid << 3 | _PROCESSOR_TIME_OF)
        except OSError:
            return math.inf

    def lower_priority(self) -> None:
        """Set the worker's nice value to `_LOW_PRIORITY`, or to this process's nice value if that is higher.

        The worker's value starts as this process's, and only root may lower a nice value.
        """
        with contextlib.suppress(OSError):
            lower = max(_LOW_PRIORITY, os.getpriority(os.PRIO_PROCESS, 0))
            os.setpriority(os.PRIO_PGRP, self._pid, lower)

    def kill(self) -> None:
        if self._pid and self._lines.is_open:
            # Only while the process lives, since another process may reuse the id of an ended one.
            left = descendants(self._pid)
            with contextlib.suppress(OSError):
                os.killpg(self._pid, signal.SIGKILL)
            kill_all(left)  # those in process groups of their own
        self._lines.close()


class _Forker:
    """The process that imports the workers' dependencies and forks workers, or is the only worker if it cannot fork."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._forks: bool = child.first["forks"]
        self._has_worker = False
        self._codes: dict[int, int] = {}
        """Return codes of workers that have ended, by process id."""
        self._changed = asyncio.Event()
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, target: str, argument: str) -> _Forker:
        command = [sys.executable, "-P", "-m", "pipelinerl.verifiers.worker_process", target, argument]
        try:
            return cls(await Child.start(command, "the verifier's process", startup_s=_STARTUP_S))
        except ChildLost as error:
            raise WorkerLost(str(error)) from None

    @property
    def ended(self) -> bool:
        return self._child.has_ended

    @property
    def can_give(self) -> bool:
        return self._forks or not self._has_worker

    async def worker(self) -> _Worker:
        ours, theirs = socket.socketpair()
        self._has_worker = True
        with theirs:
            try:
                socket.send_fds(self._child.socket, [b"w"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                self.kill()
                raise WorkerLost(await self.why_ended(0)) from error
        return await _Worker.begin(ours, self)

    async def why_ended(self, pid: int) -> str:
        """Return a sentence about the end of the worker `pid`; of this process, if it is the only worker or ended."""
        ending = "ended"
        with contextlib.suppress(TimeoutError):
            if pid == 0 or not self._forks:
                ending = await self._child.ending(timeout_s=_REPORT_S)
            else:
                async with asyncio.timeout(_REPORT_S):
                    while pid not in self._codes:
                        await self._changed.wait()
                ending = ending_of(self._codes.pop(pid))
        return f"the verifier's process {ending} before it answered"

    async def _listen(self) -> None:
        with contextlib.suppress(EOFError, ValueError, TypeError):
            while True:
                pid, code = await self._child.lines.receive()
                self._codes[pid] = code
                while len(self._codes) > _MOST_CODES:
                    del self._codes[next(iter(self._codes))]
                self._changed.set()
                self._changed = asyncio.Event()

    def kill(self) -> None:
        self._child.kill()
        self._listening.cancel()

    async def close(self) -> None:
        self._listening.cancel()
        await self._child.close()


#: Every fourth free place goes to the group that has waited longest, out of turn. At most a quarter of all places is
#: given out of turn, and they are held for at most a quarter of the time for which all places are held.
_TO_THE_OLDEST: Final = 4
#: Each time that a place is given back, the sums of the seconds for which places were held decay by this factor.
_KEPT: Final = 0.98


class FairSemaphore:
    """A limited number of places, given first to the groups with the fewest slow questions, then in order of arrival.

    To avoid starvation, every fourth free place is given out of turn, to the group that has waited longest. Since slow
    questions hold a place for longer, places given out of turn may also take up only a quarter of the time for which
    all places are held. `slow_of`, the number of slow questions per group, is read when a place becomes free.
    """

    def __init__(self, free: int, slow_of: Counter[str]) -> None:
        self._free = free
        self._slow_of = slow_of
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[bool]]]] = {}
        self._numbers = itertools.count()
        self._most_out_of_turn = max(1, free // _TO_THE_OLDEST)
        self._in_turn = self._out_of_turn = 0
        self._out_of_turn_s = self._held_s = 0.0

    def take_now(self) -> bool:
        """Take a place and return True if one is free."""
        if self._free == 0:
            return False
        self._free -= 1
        return True

    async def take(self, group: str) -> bool:
        """Wait for a place; return True if it was given out of turn, because the group had waited longest."""
        if self.take_now():
            return False
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(group, deque()).append((next(self._numbers), future))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give_back(0.0, out_of_turn=future.result())
            raise

    def give_back(self, held_s: float, *, out_of_turn: bool) -> None:
        """Pass the place to the next waiting question, or free it."""
        self._out_of_turn -= out_of_turn
        self._held_s = _KEPT * self._held_s + held_s
        self._out_of_turn_s = _KEPT * self._out_of_turn_s + held_s * out_of_turn
        while self._waiting:
            oldest = min(self._waiting, key=self._age)
            group = min(self._waiting, key=lambda each: (self._slow_of[each], self._age(each)))
            few = self._out_of_turn < self._most_out_of_turn and self._in_turn >= _TO_THE_OLDEST - 1
            is_due = few and self._out_of_turn_s * _TO_THE_OLDEST <= self._held_s
            goes_before = group != oldest and is_due
            if goes_before:
                group = oldest
            queue = self._waiting[group]
            _, future = queue.popleft()
            if not queue:
                del self._waiting[group]
            if not future.done():
                self._out_of_turn += goes_before
                self._in_turn = 0 if goes_before else self._in_turn + 1
                future.set_result(goes_before)
                return
        self._free += 1

    def _age(self, group: str) -> int:
        return self._waiting[group][0][0]
