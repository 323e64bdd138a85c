"""`WorkerPool`: sends questions to processes that may hang; killing enforces each question's deadline.

A place is the right to let one question run; a pool has `workers` normal places, and more places for slow questions.

    a question   waits for                         at most            then
    first        a normal place                    the others' turns  is sent
    sent         its answer                        it is slow         moves to a slow place, with a low priority
    slow         a slow place, then its answer     the deadline       its worker is killed: `TimeoutError`

The deadline starts when a worker receives the question. The threshold for slow is learned. A question is slow if it has
taken four times the median processor time; waiting for a busy machine does not count. It is also slow after four times
the median elapsed time, if that is more than a second. If all slow places are taken, the worker of a slow question is
killed, and the question is sent again once a slow place is free. Waiting groups with the fewest slow questions come
first, except for a quarter of the time that places are held. Hostile answers therefore do not delay their siblings or
other groups until their deadlines.

The time from question to verdict is bounded for an answer that hangs. The bound is the deadline plus four times the
time of the questions before it. Each of those questions holds a normal place for at most a fiftieth of a processor
second (or four times the median). The caller must limit the number of questions: a pool cannot judge any number at
once, and rejecting questions would mask honest answers.

Processes start on demand (`worker_process.py`): the first at `start` or at the first question, a second worker only
while the first is busy. If a caller is cancelled while a worker has its question, that worker is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import Process
from collections import Counter, deque
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, final

from pipelinerl.system import tied_process
from pipelinerl.system.background import to_its_end

_STARTUP_S: Final = 60.0
#: Longest wait for the end of a killed process: the kernel ends it as soon as it has a core for it.
_END_S: Final = 60.0
#: A question that has taken less processor time than this, and less than `_LEAST_SLOW_S` of elapsed time, is never
#: slow.
_LEAST_SLOW_CPU_S: Final = 0.02
_LEAST_SLOW_S: Final = 1.0
#: Shortest interval at which an answer's processor time is checked.
_LEAST_LOOK_S: Final = 0.002
#: `clock_getcpuclockid` adds this to another process's number; it selects the clock of all its threads, in nanoseconds.
_PROCESSOR_TIME_OF: Final = 2
_TIMES_THE_MEDIAN: Final = 4.0
#: Number of latest answers in the median: a few slow answers do not change it, however long they take.
_NEWEST: Final = 31
#: Number of slow places per normal place.
_SLOW_PLACES: Final = 2
#: Nice value of slow workers, which gives them a tenth of the processor share of other processes on Linux.
_LOW_PRIORITY: Final = 10
_LONGEST_ANSWER: Final = 2**24
#: Number of groups whose slow questions are counted.
_REMEMBERED: Final = 1024
_ENDED: Final = "the verifier's process ended by itself, or was killed, before it answered"


#: Stands for the answer to a question that has become slow and is not answered yet.
_SLOW: Final = object()


class WorkerLost(Exception):
    """A worker ended, or could not be started, before it answered."""


@final
class Overran(TimeoutError):
    """No answer within the deadline; `cpu_s` is the processor time that workers spent on the question."""

    def __init__(self, cpu_s: float) -> None:
        super().__init__(f"no answer within the deadline, after {cpu_s:.1f} s of processor time")
        self.cpu_s = cpu_s


def default_workers() -> int:
    """Return the default number of workers: one for each core that the process may use, at least two."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, cores)


@final
class WorkerPool:
    """Worker processes that all answer with the same function.

    Args:
        target, argument: reference to the function that opens a worker, and its argument; see `worker_process`.
        workers: maximum number of questions that run at once, not counting slow questions; None for `default_workers`.
        deadline_s: time limit of a question.
    """

    def __init__(self, target: str, argument: str = "", *, workers: int | None = None, deadline_s: float) -> None:
        self._target = (target, argument)
        self._deadline_s = deadline_s
        size = workers or default_workers()
        self._slow_of: Counter[str] = Counter()
        self._places = FairSemaphore(size, self._slow_of)
        self._slow_places = FairSemaphore(_SLOW_PLACES * size, self._slow_of)
        self._usual_s = _Median()
        self._usual_cpu_s = _Median()
        self._idle: list[_Worker] = []
        self._forkers: list[_Forker] = []
        self._starting = asyncio.Lock()

    async def ask(self, question: Any, *, group: str = "") -> Any:
        """Return the answer to a JSON question; questions of one `group` share their rank among waiting questions.

        Raises:
            Overran: no answer came within the deadline; a `TimeoutError`.
            WorkerLost: the process ended, or could not be started.
        """
        turn = _Turn()
        try:
            await turn.enter(self._places, group)
            turn.worker = await self._ready_worker()
            began = asyncio.get_running_loop().time()
            cpu_began = turn.worker.cpu_s
            answer = await self._answered_soon(turn.worker, question)
            if answer is _SLOW:
                self._note_slow(group)
                answer = await self._asked_slowly(turn, question, group, until=began + self._deadline_s)
            self._usual_s.note(asyncio.get_running_loop().time() - began)
            self._usual_cpu_s.note(max(0.0, turn.worker.cpu_s - cpu_began))
            if turn.places is self._places:
                self._idle.append(turn.worker)
                turn.worker = None
            return answer
        except TimeoutError:
            raise Overran(turn.cpu_s()) from None
        finally:  # kill a worker that still has the question, or that has the lowest priority
            turn.end()

    async def start(self) -> None:
        """Start the first worker before the first question. If that fails, the first question reports it."""
        with contextlib.suppress(WorkerLost, OSError, TimeoutError):
            self._idle.append(await self._ready_worker())

    async def close(self) -> None:
        """Kill every process."""
        while self._idle:
            self._idle.pop().kill()
        while self._forkers:
            await self._forkers.pop().close()

    async def _answered_soon(self, worker: _Worker, question: Any) -> Any:
        """Return the answer to a question, or `_SLOW` if the question becomes slow first."""
        clock = asyncio.get_running_loop().time
        began, cpu_began = clock(), worker.cpu_s
        slow_cpu_s = max(_LEAST_SLOW_CPU_S, _TIMES_THE_MEDIAN * self._usual_cpu_s.value)
        slow_s = min(self._deadline_s, max(_LEAST_SLOW_S, _TIMES_THE_MEDIAN * self._usual_s.value))
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

    async def _asked_slowly(self, turn: _Turn, question: Any, group: str, *, until: float) -> Any:
        """Return the answer to a slow question. If no slow place is free, kill its worker and send the question again
        later.
        """
        async with asyncio.timeout_at(until):
            if self._slow_places.take_now() and turn.worker is not None:
                turn.move(self._slow_places)
                turn.worker.lower_priority()
                return await turn.worker.receive()
            turn.end()  # every slow place is taken
            await turn.enter(self._slow_places, group)
            turn.worker = await self._ready_worker()
            turn.worker.lower_priority()
            await turn.worker.send(question)
            return await turn.worker.receive()

    def _note_slow(self, group: str) -> None:
        if len(self._slow_of) >= _REMEMBERED:
            self._slow_of.clear()
        self._slow_of[group] += 1

    async def _ready_worker(self) -> _Worker:
        if (idle := self._idle_worker()) is not None:
            return idle
        async with self._starting:
            if (idle := self._idle_worker()) is not None:  # another task started it in the meantime
                return idle
            self._forget_the_ended()
            if not (self._forkers and self._forkers[-1].can_give):
                self._forkers.append(await _Forker.start(*self._target))
            return await self._forkers[-1].worker()

    def _forget_the_ended(self) -> None:
        for forker in self._forkers:
            if forker.ended:
                forker.kill()  # closes our end of its connection
        self._forkers = [forker for forker in self._forkers if not forker.ended]

    def _idle_worker(self) -> _Worker | None:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            worker.kill()
        return None


@final
class _Median:
    """Median of the latest values; 0 without any."""

    def __init__(self) -> None:
        self.value = 0.0
        self._newest: deque[float] = deque(maxlen=_NEWEST)

    def note(self, value: float) -> None:
        """Add a value."""
        self._newest.append(value)
        self.value = median(self._newest)


@final
@dataclass(slots=True)
class _Turn:
    """Resources of one question: a place, and a worker."""

    places: FairSemaphore | None = None
    worker: _Worker | None = None
    _out_of_turn: bool = False
    _since: float = 0.0
    _cpu_before_s: float = 0.0

    async def enter(self, places: FairSemaphore, group: str) -> None:
        """Wait for one of `places`."""
        self._has(places, out_of_turn=await places.take(group))

    def move(self, places: FairSemaphore) -> None:
        """Exchange the held place for one of `places` that the caller has already taken."""
        self.leave()
        self._has(places, out_of_turn=False)

    def leave(self) -> None:
        """Give the place back."""
        if self.places is not None:
            self.places.give_back(time.monotonic() - self._since, out_of_turn=self._out_of_turn)
            self.places = None

    def _has(self, places: FairSemaphore, *, out_of_turn: bool) -> None:
        self.places, self._out_of_turn, self._since = places, out_of_turn, time.monotonic()

    def cpu_s(self) -> float:
        """Return the processor seconds that workers have spent on the question without an answer."""
        return self._cpu_before_s + (0.0 if self.worker is None else self.worker.cpu_now_s() - self.worker.cpu_s)

    def end(self) -> None:
        """Give back the place, and kill the worker if there still is one."""
        if self.worker is not None:
            self._cpu_before_s = self.cpu_s()
            self.worker.kill()
            self.worker = None
        self.leave()


@final
class _Worker:
    """One worker process, in its own process group."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int) -> None:
        self._reader = reader
        self._writer = writer
        self._pid = pid
        self.cpu_s = 0.0
        """Processor seconds that the worker had used when it gave its latest answer."""

    @classmethod
    async def begin(cls, connection: socket.socket) -> _Worker:
        """Wait for the worker's first line, which holds its process id."""
        try:
            reader, writer = await asyncio.open_unix_connection(sock=connection, limit=_LONGEST_ANSWER)
        except BaseException:
            connection.close()
            raise
        worker = cls(reader, writer, 0)
        try:
            async with asyncio.timeout(_STARTUP_S):
                worker._pid = await worker.receive()
        except BaseException:
            writer.close()
            raise
        return worker

    @property
    def alive(self) -> bool:
        """True if the worker's end of the connection is open, as far as is known."""
        return not self._reader.at_eof() and not self._writer.is_closing()

    async def send(self, question: Any) -> None:
        """Send the worker a question; after a cancellation the rest is still sent.

        Questions are encoded only here: otherwise a problem of megabytes would be held once for each of its answers.
        """
        try:
            self._writer.write(json.dumps(question).encode() + b"\n")
            await self._writer.drain()
        except OSError as error:
            raise WorkerLost(_ENDED) from error

    async def receive(self) -> Any:
        """Return the worker's next answer."""
        try:
            line = await self._reader.readline()
        except (OSError, ValueError) as error:
            raise WorkerLost(f"the verifier's process answered with more than {_LONGEST_ANSWER} bytes") from error
        if not line.endswith(b"\n"):
            raise WorkerLost(_ENDED)
        answer, self.cpu_s = json.loads(line)
        return answer

    def cpu_now_s(self) -> float:
        """Return the processor seconds that the worker has used so far; infinite if unknown."""
        try:
            return time.clock_gettime(~self._pid << 3 | _PROCESSOR_TIME_OF)
        except OSError:
            return math.inf

    def lower_priority(self) -> None:
        """Lower the worker's priority to the lowest in use, but never above this process's own, which only root could
        raise.
        """
        with contextlib.suppress(OSError):
            lower = max(_LOW_PRIORITY, os.getpriority(os.PRIO_PROCESS, 0))
            os.setpriority(os.PRIO_PGRP, self._pid, lower)

    def kill(self) -> None:
        """Kill the worker and its child processes."""
        if self._pid and not self._reader.at_eof():  # the id of an ended process may be reused
            with contextlib.suppress(OSError):
                os.killpg(self._pid, signal.SIGKILL)
        self._writer.close()


@final
class _Forker:
    """The process that imports the workers' dependencies and forks workers; if it cannot fork, it is the only
    worker.
    """

    def __init__(self, process: Process, control: socket.socket, *, forks: bool) -> None:
        self._process = process
        self._control = control
        self._forks = forks
        self._has_worker = False

    @classmethod
    async def start(cls, target: str, argument: str) -> _Forker:
        """Start the process and wait until its imports are done."""
        ours, theirs = socket.socketpair()
        tie = [tied_process.__file__, str(os.getpid()), signal.SIGKILL.name, "", "--"]
        main = [sys.executable, "-m", "pipelinerl.verifiers.worker_process", target, argument]
        command = [sys.executable, "-S", "-E", *tie, *main]
        with theirs, contextlib.ExitStack() as given_up:
            given_up.callback(ours.close)
            process = await asyncio.create_subprocess_exec(*command, stdin=theirs.fileno())
            given_up.pop_all()
        ours.setblocking(False)
        forker = cls(process, ours, forks=False)
        try:
            async with asyncio.timeout(_STARTUP_S):
                first = await _line(ours)
        except (TimeoutError, OSError, ValueError):
            await forker.close()
            raise WorkerLost("the verifier's process did not start; see its output") from None
        except BaseException:
            await forker.close()  # cancelled: wait for the killed process, too, while the event loop still runs
            raise
        if "error" in first:
            await forker.close()
            raise WorkerLost(first["error"])
        forker._forks = first["forks"]
        return forker

    @property
    def ended(self) -> bool:
        """True if the process has ended."""
        return self._process.returncode is not None

    @property
    def can_give(self) -> bool:
        """True if it can provide another worker."""
        return self._forks or not self._has_worker

    async def worker(self) -> _Worker:
        """Return another worker."""
        ours, theirs = socket.socketpair()
        self._has_worker = True
        with theirs:
            try:
                socket.send_fds(self._control, [b"w"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                self.kill()
                raise WorkerLost(_ENDED) from error
        return await _Worker.begin(ours)

    def kill(self) -> None:
        """Kill the process; its workers die with it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._control.close()

    async def close(self) -> None:
        """Kill the process and wait for its end, even if this call is cancelled: no other code would reap the
        process.
        """
        self.kill()
        await to_its_end(asyncio.wait_for(self._process.wait(), _END_S))


async def _line(control: socket.socket) -> Any:
    """Receive the first line, as JSON. Raises `ValueError` if the other end closes first."""
    received = b""
    while not received.endswith(b"\n"):
        part = await asyncio.get_running_loop().sock_recv(control, 65536)
        if not part:
            raise ValueError("no line")
        received += part
    return json.loads(received)


#: The longest waiting group gets at most one in this many of places passed on, of places held at once, and of seconds
#: held.
_TO_THE_OLDEST: Final = 4
#: Factor by which the sums of seconds held decay each time that a place is given back.
_KEPT: Final = 0.98


@final
class FairSemaphore:
    """A limited number of places, each of which lets one question run.

    Groups with the fewest slow questions come first, then the order of arrival. To avoid starvation, every fourth free
    place goes to the group that has waited longest. Such places are limited to a quarter of the total time that places
    are held, since slow questions hold a place longer than others.

    Args:
        slow_of: number of slow questions per group. It is read when a place becomes free. A group's first slow question
            therefore counts against all waiting questions of the group.
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
        """Take a place if one is free."""
        if self._free == 0:
            return False
        self._free -= 1
        return True

    async def take(self, group: str) -> bool:
        """Wait for a place; return whether it was given out of turn, because the group had waited longest."""
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
        """Pass the place on to the next waiting question, or free it."""
        self._out_of_turn -= out_of_turn
        self._held_s = _KEPT * self._held_s + held_s
        self._out_of_turn_s = _KEPT * self._out_of_turn_s + held_s * out_of_turn
        while self._waiting:
            oldest = min(self._waiting, key=self._age)
            group = min(self._waiting, key=lambda each: (self._slow_of[each], self._age(each)))
            goes_before = group != oldest and self._oldest_is_due
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

    @property
    def _oldest_is_due(self) -> bool:
        few = self._out_of_turn < self._most_out_of_turn and self._in_turn >= _TO_THE_OLDEST - 1
        return few and self._out_of_turn_s * _TO_THE_OLDEST <= self._held_s

    def _age(self, group: str) -> int:
        return self._waiting[group][0][0]
