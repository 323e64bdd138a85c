"""Command execution on ranks above 0 of a JAX trainer."""

from __future__ import annotations

from pathlib import Path
from typing import final

from pipelinerl.trainers.jax.trainer import read_spec
from pipelinerl.trainers.jax.worker import JaxWorker
from pipelinerl.trainers.ranks.commands import (
    Backward,
    Command,
    Discard,
    ForwardAt,
    ForwardCommand,
    Gather,
    RankResult,
    Save,
    StepCommand,
    decode_batch,
    decode_objective,
)
from trainer_contract.errors import StateError
from trainer_contract.types import TrainerSpec


@final
class JaxFollower:
    """Implements `ranks.follower.RankWorker`. Its results are not used: rank 0 computes every result itself."""

    def __init__(self, spec: TrainerSpec) -> None:
        options, config = read_spec(spec)
        self._worker = JaxWorker.started(spec, options, config)

    def execute(self, command: Command) -> list[RankResult]:
        """Run the same worker method as rank 0."""
        worker = self._worker
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
        return []


def _save(worker: JaxWorker, path: Path) -> None:
    if not path.is_dir():
        raise StateError(
            f"{path} does not exist on this host; put the run's directory on a file system that every host mounts at "
            "the same path"
        )
    worker.save_parts(path)
