"""What a rank above 0 of a JAX trainer does: hold its shards, and execute what rank 0 says, until rank 0 ends.

    who waits           for what                           until         unblocked by
    the main thread     rank 0's next message or beat      silence_s     rank 0
    a lane's thread     the next command of its lane       —             the main thread

It knows no stream, no controller and no checkpoint. Promises: it ends when rank 0 does, and with a sentence, within
`silence_s`, when rank 0 dies or hangs, also while a collective of its own waits for rank 0 for ever.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import final

from pipelinerl.trainers.jax.channel import Channel
from pipelinerl.trainers.jax.commands import (
    Backward,
    Close,
    Command,
    Discard,
    ForwardAt,
    ForwardCommand,
    Gather,
    Lane,
    Numbered,
    RankAnswer,
    RanksEnd,
    Save,
    StartCommand,
    StepCommand,
    decode,
    decode_batch,
    decode_objective,
    decode_spec,
    encode,
)
from pipelinerl.trainers.jax.options import Distributed
from pipelinerl.trainers.jax.rendezvous import join_rank0
from pipelinerl.trainers.jax.trainer import read_spec
from pipelinerl.trainers.jax.worker import JaxWorker
from trainer_contract.errors import RankError, StateError, TrainerError


def follow(distributed: Distributed, *, say: Callable[[str], None]) -> None:
    """Join rank 0 and obey it; returns when it says that its work is done.

    Raises:
        SpecError: rank 0 does not answer, or refuses this rank.
        RankError: rank 0 died, hangs or has given up; or this rank failed, which rank 0 was told.
    """
    channel = join_rank0(distributed)
    say(f"rank {distributed.process} of {distributed.processes} follows {distributed.coordinator}")
    rank = _Rank(channel)
    while True:
        message = decode(channel.receive())
        if isinstance(message, RanksEnd):
            if message.reason:
                raise RankError(message.reason)
            return
        if not isinstance(message, Numbered):
            raise RankError(f"rank 0 said {type(message).__name__}, expected a command; install one version")
        rank.take(message)


@final
class _Rank:
    """The trainers of this process, by rank 0's numbers, and the threads that work for them."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._workers: dict[int, JaxWorker] = {}
        self._lanes: dict[Lane, queue.SimpleQueue[Numbered]] = {lane: queue.SimpleQueue() for lane in Lane}
        for lane in Lane:
            threading.Thread(target=self._work, args=(lane,), name=f"rank-{lane}", daemon=True).start()

    def take(self, numbered: Numbered) -> None:
        """Hand a command to its lane."""
        self._lanes[numbered.lane].put(numbered)

    def _work(self, lane: Lane) -> None:
        while True:
            numbered = self._lanes[lane].get()
            error: BaseException | None = None
            try:
                self._execute(numbered.command)
            except TrainerError as refusal:
                error = refusal
            except (RuntimeError, ValueError, OSError) as failed:  # JAX's, TensorStore's, the disk's
                files = lane is Lane.FILES
                error = StateError(str(failed)) if files else RankError(f"{type(failed).__name__}: {failed}")
            except BaseException:  # a mistake of ours: both ranks end at once
                self._channel.close()
                raise
            answer = RankAnswer(numbered.number, type(error).__name__ if error else "", str(error) if error else "")
            try:
                self._channel.send(encode(answer))
            except RankError:
                return  # the main thread meets it, too

    def _execute(self, command: Command) -> None:
        if isinstance(command, StartCommand):
            spec = decode_spec(command.spec)
            options, config = read_spec(spec)
            self._workers[command.trainer] = JaxWorker.started(spec, options, config)
            return
        if isinstance(command, Close):
            self._workers.pop(command.trainer, None)
            return
        worker = self._workers[command.trainer]
        match command:
            case ForwardCommand():
                worker.forward([decode_batch(batch) for batch in command.batches])
            case ForwardAt():
                worker.forward_at([decode_batch(batch) for batch in command.batches], None)
            case Backward():
                batches = [decode_batch(batch) for batch in command.batches]
                worker.backward(batches, decode_objective(command.objective))
            case StepCommand():
                worker.optimizer_step(command.learning_rate)
            case Discard():
                worker.gradient = None
            case Gather():
                worker.gathered(command.place)
            case Save():
                _save(worker, Path(command.path))


def _save(worker: JaxWorker, path: Path) -> None:
    if not path.is_dir():
        raise StateError(
            f"{path} is not there on this host; put the run's directory on a file system that every host mounts alike"
        )
    worker.save_parts(path)
