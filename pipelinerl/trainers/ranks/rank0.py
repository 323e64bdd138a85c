"""`Ranks`, rank 0's side of a multi-process trainer: it runs each verb (a method of the contract) on all ranks.

    who waits                     for                           until                    unblocked by
    the caller of a verb          rank 0's part, and answers    timeout_s                the ranks, or a rank's loss
    a lane's thread               the next command              the process ends         the callers
    the reader of a rank          its message or heartbeat      silence_s                that rank

When a verb begins, its command is sent to all ranks, and the single thread of the command's lane executes rank 0's
part. All devices thus run the same programs in the same order, whatever thread called the verb. A verb may begin before
the previous one has ended.

If a rank dies, hangs or fails, the current and every later verb raise a `RankError` that names this rank, and all other
ranks are ended. If a computation hangs in a collective, its daemon thread is abandoned.
"""

from __future__ import annotations

import atexit
import itertools
import os
import queue
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

from pipelinerl.trainers.ranks import commands as wire
from pipelinerl.trainers.ranks.rendezvous import Distributed, Join, gather_ranks
from trainer_contract.errors import RankError, SpecError, StateError, TrainerError

T = TypeVar("T")
#: Source of the numbers that identify this process's trainers in commands.
TRAINER_NUMBERS: Final = itertools.count(1)
#: Seconds that a failed collective waits for a clearer error. The collective fails as soon as a rank is gone, but only
#: the thread that reads from that rank raises an error with the rank's name.
_NAMING_S: Final = 2.0
#: Longest time in seconds from the loss of a rank to the end of this process, even if a collective blocks JAX's cleanup
#: forever.
_LAST_S: Final = 60.0
#: Errors that a single rank may raise, because they concern files on its own host.
_OTHERS_FIND: Final = {"SpecError": SpecError, "StateError": StateError}


class RankResults(NamedTuple, Generic[T]):
    """The result of a verb: the value that rank 0's part returned, and the other ranks' results by rank."""

    own: T
    others: Mapping[int, list[wire.RankResult]]


@dataclass(slots=True)
class _Pending:
    number: int
    verb: str
    own: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future)
    answers: dict[int, wire.RankAnswer] = field(default_factory=dict)

    @property
    def is_of_all(self) -> bool:
        """True if the failure of one rank blocks all ranks; False for Save, where each rank writes its own files."""
        return self.verb != wire.Save.__name__

    @property
    def has_failed(self) -> bool:
        """True if rank 0's part failed with an error other than TrainerError, after which ranks cannot continue."""
        return self.result.done() and not isinstance(self.result.exception(), TrainerError | None)


def _end_process(error: RankError) -> None:
    print(f"pipelinerl: the trainer exits without its ranks: {error}", file=sys.stderr, flush=True)
    os._exit(1)


class Ranks:
    """Rank 0's connections to the other ranks.

    `end_process` is called if this process has not ended by itself within `_LAST_S` seconds of the loss of a rank.
    """

    def __init__(
        self,
        channels: Mapping[int, wire.Channel],
        *,
        timeout_s: float,
        end_process: Callable[[RankError], None] = _end_process,
    ) -> None:
        self._channels = channels
        self._end_process = end_process
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._pending: dict[int, _Pending] = {}
        self._given = 0
        self._lost: RankError | None = None
        self._left_for = ""
        self._order = {lane: threading.Lock() for lane in wire.Lane}
        self._lanes: dict[wire.Lane, queue.SimpleQueue[_Pending]] = {lane: queue.SimpleQueue() for lane in wire.Lane}
        for lane in wire.Lane:
            threading.Thread(target=self._execute, args=(lane,), name=f"ranks-{lane}", daemon=True).start()
        for rank, channel in channels.items():
            threading.Thread(target=self._read, args=(rank, channel), name=f"rank-{rank}", daemon=True).start()

    def together(
        self, command: Callable[[int], wire.Command], own: Callable[[], T], *, lane: wire.Lane
    ) -> RankResults[T]:
        """Run a command on all ranks and return its result. Raises the errors of `begin`."""
        return self.begin(command, own, lane=lane)()

    def begin(
        self, command: Callable[[int], wire.Command], own: Callable[[], T], *, lane: wire.Lane
    ) -> Callable[[], RankResults[T]]:
        """Start `command(rank)` on every other rank, and `own`, which is rank 0's part, on this one.

        Returns a function that waits for the result; call it once. It raises:
            TrainerError: `own` raised it, or another rank did (SpecError, StateError) for a file of its own host.
            RankError: a rank failed otherwise, was lost in this verb or an earlier one, or was too late (`timeout_s`).
        """
        with self._order[lane]:
            with self._changed:
                self._raise_if_lost()
                self._given += 1
                number = self._given
                commands = {rank: command(rank) for rank in self._channels}
                pending = _Pending(number, type(commands[min(commands)]).__name__, own)
                self._pending[number] = pending
            try:
                for rank, channel in self._channels.items():
                    channel.send(wire.encode(wire.Numbered(number, lane, commands[rank])))
            except RankError as error:  # the thread that reads from this rank reports why it was lost
                pending.result.set_exception(error)
            else:
                self._lanes[lane].put(pending)
        return partial(self._ended, pending)

    def _ended(self, pending: _Pending) -> RankResults[Any]:
        def has_ended() -> bool:
            all_done = pending.result.done() and len(pending.answers) == len(self._channels)
            return self._lost is not None or pending.has_failed or all_done

        with self._changed:
            ended = self._changed.wait_for(has_ended, timeout=self._timeout_s)
            if pending.has_failed and pending.is_of_all:
                self._changed.wait_for(lambda: self._lost is not None, timeout=_NAMING_S)
            del self._pending[pending.number]
            self._raise_if_lost()
        if not ended:
            missing = [rank for rank in self._channels if rank not in pending.answers]
            waits_for = [*([] if pending.result.done() else [0]), *missing]
            why = f"still waiting for rank {', '.join(map(str, waits_for))}; start all ranks again"
            most = f"options.distributed.timeout_s = {self._timeout_s:g} s"
            raise self._lose(RankError(f"{pending.verb} took more than {most}: {why}"))
        return RankResults(self._outcome(pending), {rank: answer.results for rank, answer in pending.answers.items()})

    def drop(self, trainer: int) -> None:
        with suppress(RankError):  # a lost rank has no state to free
            self.together(lambda _: wire.Close(trainer), lambda: None, lane=wire.Lane.PASSES)

    def leave(self, reason: str) -> None:
        """Record that this process will end before its work is done; `end` sends `reason` to the other ranks."""
        self._left_for = reason

    def end(self) -> None:
        """End the other ranks. If `leave` was called before, they fail with its `reason`, and are restarted."""
        with self._changed:
            lost, self._lost = self._lost, self._lost or RankError("the ranks of this trainer have been ended")
        if lost is None:
            self._dismiss(wire.RanksEnd(reason=self._left_for))

    def _outcome(self, pending: _Pending) -> Any:
        verb, error = pending.verb, pending.result.exception()
        if pending.has_failed and pending.is_of_all:
            failed = RankError(
                f"{verb} failed on rank 0: {error}; a rank or the network has died: start all ranks again"
            )
            raise self._lose(failed) from error
        if error is not None:
            raise error
        for rank, answer in sorted(pending.answers.items()):
            if answer.error:
                kind = _OTHERS_FIND.get(answer.error)
                if kind is not None:
                    raise kind(f"rank {rank}: {answer.sentence}")
                raise self._lose(RankError(f"rank {rank} failed in {verb}: {answer.sentence}; start all ranks again"))
        return pending.result.result()

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise RankError(str(self._lost)) from self._lost

    def _lose(self, error: RankError) -> RankError:
        """Give up after a rank's loss: end all others, start a watchdog on this process. Return the first loss."""
        with self._changed:
            if self._lost is not None:
                return self._lost
            self._lost = error
            self._changed.notify_all()
        self._dismiss(wire.RanksEnd(reason=f"rank 0 has given up: {error}"))
        watchdog = threading.Timer(_LAST_S, self._end_process, args=(error,))
        watchdog.daemon = True
        watchdog.start()
        return error

    def _dismiss(self, end: wire.RanksEnd) -> None:
        for channel in self._channels.values():
            with suppress(RankError):  # sending fails if the rank at the other end is lost or ending
                channel.send(wire.encode(end))
            channel.close()

    def _execute(self, lane: wire.Lane) -> None:
        while True:
            pending = self._lanes[lane].get()
            try:
                result = pending.own()
            except BaseException as error:  # the error is passed to the caller of the verb
                pending.result.set_exception(error)
            else:
                pending.result.set_result(result)
            with self._changed:
                self._changed.notify_all()

    def _read(self, rank: int, channel: wire.Channel) -> None:
        try:
            while True:
                answer = wire.decode(channel.receive())
                if not isinstance(answer, wire.RankAnswer):
                    raise RankError(
                        f"rank {rank} sent {type(answer).__name__} instead of RankAnswer; install the same version "
                        "everywhere"
                    )
                with self._changed:
                    pending = self._pending.get(answer.number)
                    if pending is not None:
                        pending.answers[rank] = answer
                        self._changed.notify_all()
        except RankError as error:
            self._lose(
                RankError(f"{error}; see its log, and start all ranks again: the run resumes from its checkpoint")
            )


def one_ahead(begun: Iterable[Callable[[], T]]) -> Generator[T]:
    """Yield the results of verbs in order, but begin the next verb before waiting for a result.

    Each step of `begun` begins a verb and yields the function that waits for its result. If the caller stops early,
    wait for the verb in progress.
    """
    ended: Callable[[], T] | None = None
    try:
        for following in begun:
            ended, now = following, ended
            if now is not None:
                yield now()
        if ended is not None:
            now, ended = ended, None
            yield now()
    finally:
        if ended is not None:
            with suppress(TrainerError):  # the caller stopped early, or is already handling another error
                ended()


_led: tuple[Distributed, Ranks] | None = None


def lead(distributed: Distributed, join: Join) -> Ranks:
    """Wait until all other ranks have joined; return the connections to them. Raises SpecError if one does not join."""
    global _led
    if distributed.process != 0:
        raise SpecError(
            f"options.distributed.process is {distributed.process}, and only rank 0 is a trainer; start "
            f"`pipelinerl trainer-rank --rank {distributed.process}` here"
        )
    if _led is None:
        ranks = Ranks(gather_ranks(distributed, join), timeout_s=distributed.timeout_s)
        # Exit hooks run in reverse order of registration, so this one runs before the array library's.
        atexit.register(ranks.end)
        _led = (distributed, ranks)
    if _led[0] != distributed:
        raise SpecError("options.distributed must be the same for every trainer of a process; use the same recipe")
    return _led[1]


def leave_undone() -> None:
    """Record that this process ends before its work is done: the other ranks then fail and are restarted."""
    if _led is not None:
        _led[1].leave("rank 0 has ended before its work was done; see its log")
