"""`WorkerPool`: questions to processes that may hang, each with a deadline that holds, since it is kept by killing.

    a question   waits for                         at most            then
    first        one of `workers` places           the others' turns  is asked
    asked        its answer                        it is slow         moves to a slow place, with a low priority
    slow         a slow place, then its answer     the deadline       its worker is killed: `TimeoutError`

The deadline runs from the moment at which a worker is given the question. What is slow is learned: a question is that
has taken four times the processor time of the median (on a busy machine, a worker that is kept waiting is not), or four
times the median on the clock if that is more than a second. One that finds every slow place taken is asked anew when
one is free. Of those that wait, groups with the fewest slow questions so far come first, but for a quarter of the time
that places are held. So hostile answers do not hold up their siblings or other groups until their deadlines.

What is promised of an answer that hangs, from the question to its verdict: the deadline, and four times what those take
that came before it, each of which holds one of `workers` places for a fiftieth of a processor second at most (or four
times the median). How many come before it is for who asks to bound: no pool can judge any number of answers at once,
and one that refused them would mask honest ones.

Processes start when they are needed (`worker_process.py`): the first at `start`, or else at the first question, a
second worker only while the first is busy. Whoever is cancelled while a worker has its question has that worker killed.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from pipelinerl.verifiers.places import FairSemaphore

_STARTUP_S: Final = 60.0
#: The kernel ends at once what is killed, as soon as it has a core for it.
_END_S: Final = 60.0
#: An answer that takes less processor time, or less on the clock, is never slow.
_LEAST_SLOW_CPU_S: Final = 0.02
_LEAST_SLOW_S: Final = 1.0
#: So often at most it is looked at what processor time an answer has taken.
_LEAST_LOOK_S: Final = 0.002
#: What `clock_getcpuclockid` adds to another process's number: the clock of all its threads, in nanoseconds.
_PROCESSOR_TIME_OF: Final = 2
_TIMES_THE_MEDIAN: Final = 4.0
#: Answers of which the median is: few that are slow do not move it, whatever they took.
_NEWEST: Final = 31
#: Slow places for each of the others.
_SLOW_PLACES: Final = 2
#: A tenth of the share of others, as Linux counts.
_LOW_PRIORITY: Final = 10
_LONGEST_ANSWER: Final = 2**24
#: Groups whose slow questions are remembered.
_REMEMBERED: Final = 1024
_ENDED: Final = "the verifier's process ended by itself, or was killed, before it answered"


#: Stands for an answer that has not come yet.
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
    """Workers of a pool when the recipe names no number: one for each core that the process may use, two at least."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, cores)


@final
class WorkerPool:
    """Workers of one kind.

    Args:
        target, argument: what a worker calls first, see `worker_process`.
        workers: most that answer at once, beside those that are slow; None: `default_workers`.
        deadline_s: how long a worker may take for a question.
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
        """The answer to a JSON question; `group` is who asks, for the order among those that wait.

        Raises:
            Overran: none came within the deadline; a `TimeoutError`.
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
        finally:  # a worker that has not answered, or is of the lowest priority, is of no more use
            turn.end()

    async def start(self) -> None:
        """Start the first worker, which the first question would wait for; one that cannot be started says so there."""
        with contextlib.suppress(WorkerLost, OSError, TimeoutError):
            self._idle.append(await self._ready_worker())

    async def close(self) -> None:
        """Kill every process."""
        while self._idle:
            self._idle.pop().kill()
        while self._forkers:
            await self._forkers.pop().close()

    async def _answered_soon(self, worker: _Worker, question: Any) -> Any:
        """The answer to a question, or `_SLOW`."""
        clock = asyncio.get_running_loop().time
        began, cpu_began = clock(), worker.cpu_s
        slow_cpu_s = max(_LEAST_SLOW_CPU_S, _TIMES_THE_MEDIAN * self._usual_cpu_s.value)
        slow_s = min(self._deadline_s, max(_LEAST_SLOW_S, _TIMES_THE_MEDIAN * self._usual_s.value))
        asked, look_s = False, min(slow_cpu_s, slow_s)
        while True:
            try:
                async with asyncio.timeout(look_s):
                    if not asked:
                        asked = True
                        await worker.send(question)
                    return await worker.receive()
            except TimeoutError:
                left_s = slow_cpu_s - (worker.cpu_now_s() - cpu_began)
                if clock() - began >= slow_s or left_s <= 0:
                    return _SLOW
                look_s = max(_LEAST_LOOK_S, left_s)

    async def _asked_slowly(self, turn: _Turn, question: Any, group: str, *, until: float) -> Any:
        """The answer to a question that was not answered quickly; another worker is asked when this one has to go."""
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
            if (idle := self._idle_worker()) is not None:  # it came up meanwhile
                return idle
            self._forget_the_ended()
            if not (self._forkers and self._forkers[-1].can_give):
                self._forkers.append(await _Forker.start(*self._target))
            return await self._forkers[-1].worker()

    def _forget_the_ended(self) -> None:
        for forker in self._forkers:
            if forker.ended:
                forker.kill()  # lets go of our end of its connection
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
    """Of the newest few; 0 until there is one."""

    def __init__(self) -> None:
        self.value = 0.0
        self._newest: deque[float] = deque(maxlen=_NEWEST)

    def note(self, value: float) -> None:
        """Add one."""
        self._newest.append(value)
        self.value = median(self._newest)


@final
@dataclass(slots=True)
class _Turn:
    """What one question holds: a place, and a worker."""

    places: FairSemaphore | None = None
    worker: _Worker | None = None
    _out_of_turn: bool = False
    _since: float = 0.0
    _cpu_before_s: float = 0.0

    async def enter(self, places: FairSemaphore, group: str) -> None:
        """Wait for a place."""
        self._has(places, out_of_turn=await places.take(group))

    def move(self, places: FairSemaphore) -> None:
        """Give the place back, and have one of these, which was taken."""
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
        """Processor seconds that workers have spent on the question without an answer."""
        return self._cpu_before_s + (0.0 if self.worker is None else self.worker.cpu_now_s() - self.worker.cpu_s)

    def end(self) -> None:
        """Give everything back; a worker that is still held is killed."""
        if self.worker is not None:
            self._cpu_before_s = self.cpu_s()
            self.worker.kill()
            self.worker = None
        self.leave()


@final
class _Worker:
    """One process that answers, a group of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int) -> None:
        self._reader = reader
        self._writer = writer
        self._pid = pid
        self.cpu_s = 0.0
        """Processor seconds that it had taken when it last answered."""

    @classmethod
    async def begin(cls, connection: socket.socket) -> _Worker:
        """Wait for its first line, which says its process id."""
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
        """Is its end of the connection open, as far as is known?"""
        return not self._reader.at_eof() and not self._writer.is_closing()

    async def send(self, question: Any) -> None:
        """Give it a question; cancelled, it gets the rest of it nevertheless.

        What waits for its turn is no text yet: of a problem of megabytes there would be one for each of its answers.
        """
        try:
            self._writer.write(json.dumps(question).encode() + b"\n")
            await self._writer.drain()
        except OSError as error:
            raise WorkerLost(_ENDED) from error

    async def receive(self) -> Any:
        """Its next answer."""
        try:
            line = await self._reader.readline()
        except (OSError, ValueError) as error:
            raise WorkerLost(f"the verifier's process answered with more than {_LONGEST_ANSWER} bytes") from error
        if not line.endswith(b"\n"):
            raise WorkerLost(_ENDED)
        answer, self.cpu_s = json.loads(line)
        return answer

    def cpu_now_s(self) -> float:
        """Processor seconds that it has taken by now; infinite where that cannot be told."""
        try:
            return time.clock_gettime(~self._pid << 3 | _PROCESSOR_TIME_OF)
        except OSError:
            return math.inf

    def lower_priority(self) -> None:
        """Let every other process go first, from now on; where all are of a lower priority, root would raise it."""
        with contextlib.suppress(OSError):
            lower = max(_LOW_PRIORITY, os.getpriority(os.PRIO_PROCESS, 0))
            os.setpriority(os.PRIO_PGRP, self._pid, lower)

    def kill(self) -> None:
        """End it, and what it has started, at once."""
        if self._pid and not self._reader.at_eof():  # after its end the number may be another's
            with contextlib.suppress(OSError):
                os.killpg(self._pid, signal.SIGKILL)
        self._writer.close()


@final
class _Forker:
    """The process that has imported what its workers need; one that cannot fork is the only worker itself."""

    def __init__(self, process: Process, control: socket.socket, *, forks: bool) -> None:
        self._process = process
        self._control = control
        self._forks = forks
        self._has_worker = False

    @classmethod
    async def start(cls, target: str, argument: str) -> _Forker:
        """Start it and wait until it has imported."""
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
            raise WorkerLost("the verifier's process did not start; its output says why") from None
        except BaseException:
            await forker.close()  # cancelled: what is killed is waited for, too, while there is a loop that can
            raise
        if "error" in first:
            await forker.close()
            raise WorkerLost(first["error"])
        forker._forks = first["forks"]
        return forker

    @property
    def ended(self) -> bool:
        """Is the process gone?"""
        return self._process.returncode is not None

    @property
    def can_give(self) -> bool:
        """Can it give another worker?"""
        return self._forks or not self._has_worker

    async def worker(self) -> _Worker:
        """Another worker."""
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
        """End it at once, and with it its workers."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._control.close()

    async def close(self) -> None:
        """End it, and wait for that, cancelled or not: nobody else would."""
        self.kill()
        await to_its_end(asyncio.wait_for(self._process.wait(), _END_S))


async def _line(control: socket.socket) -> Any:
    """The first line that comes, as JSON; raises `ValueError` when the other end closes before."""
    received = b""
    while not received.endswith(b"\n"):
        part = await asyncio.get_running_loop().sock_recv(control, 65536)
        if not part:
            raise ValueError("no line")
        received += part
    return json.loads(received)
