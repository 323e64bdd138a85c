"""The loop of a rank above 0: hold its shards and execute rank 0's commands until rank 0 ends.

    who waits           for                                until         unblocked by
    the main thread     rank 0's message or heartbeat      silence_s     rank 0
    a lane's thread     the next command of its lane       —             the main thread

A lane is a queue of commands, which run in order on the lane's own thread. If rank 0 dies or hangs, this process ends
with an error message within `silence_s`, even if a collective blocks in one of its threads.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from pipelinerl.trainers.ranks import commands as wire
from pipelinerl.trainers.ranks.rendezvous import Distributed, Join, join_rank0
from trainer_contract.errors import RankError, StateError, TrainerError
from trainer_contract.types import TrainerSpec


class RankWorker(Protocol):
    """One process's shards of a trainer, and the trainer's methods that compute on these shards."""

    def execute(self, command: wire.Command) -> list[wire.RankResult]:
        """Execute this rank's share of a command; every rank sees a lane's commands in order. Raises TrainerError."""
        ...


#: Function that creates a trainer's worker on a rank above 0, like `init_worker` on rank 0.
Start = Callable[[TrainerSpec], RankWorker]


def follow(distributed: Distributed, *, join: Join, start: Start, say: Callable[[str], None]) -> None:
    """Execute rank 0's commands until its end. Raises SpecError if it rejects this rank, RankError if one fails."""
    channel = join_rank0(distributed, join)
    say(f"rank {distributed.process} of {distributed.processes} follows {distributed.coordinator}")
    workers: dict[int, RankWorker] = {}
    lanes: dict[wire.Lane, queue.SimpleQueue[wire.Numbered]] = {lane: queue.SimpleQueue() for lane in wire.Lane}
    for lane, commands in lanes.items():
        work = (channel, commands, workers, start)
        threading.Thread(target=_execute, args=work, name=f"rank-{lane}", daemon=True).start()
    while True:
        message = wire.decode(channel.receive())
        if isinstance(message, wire.RanksEnd):
            if message.reason:
                raise RankError(message.reason)
            return
        if not isinstance(message, wire.Numbered):
            raise RankError(
                f"rank 0 sent {type(message).__name__}, expected a command; install the same version everywhere"
            )
        lanes[message.lane].put(message)


def _execute(
    channel: wire.Channel, commands: queue.SimpleQueue[wire.Numbered], workers: dict[int, RankWorker], start: Start
) -> None:
    """Execute the commands of one lane, and send the answers; `workers` are those of all lanes."""
    while True:
        numbered = commands.get()
        command, results = numbered.command, list[wire.RankResult]()
        error: TrainerError | None = None
        try:
            if isinstance(command, wire.StartCommand):
                workers[command.trainer] = start(wire.decode_spec(command.spec))
            elif isinstance(command, wire.Close):
                workers.pop(command.trainer, None)
            else:
                results = workers[command.trainer].execute(command)
        except TrainerError as refusal:
            error = refusal
        except (RuntimeError, ValueError, OSError) as failed:
            # These errors come from the array library, a file's reader or the disk.
            files = isinstance(command, wire.Save)
            error = StateError(str(failed)) if files else RankError(f"{type(failed).__name__}: {failed}")
        except BaseException:  # a bug: close the channel so that rank 0 notices immediately and both processes end
            channel.close()
            raise
        failure = (type(error).__name__, str(error)) if error else ("", "")
        try:
            channel.send(wire.encode(wire.RankAnswer(numbered.number, results, *failure)))
        except RankError:
            return  # the main thread's `receive` raises the same error and reports it
