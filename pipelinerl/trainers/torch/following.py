"""Command execution on ranks above 0 of a torch trainer."""

from __future__ import annotations

from pathlib import Path
from typing import final

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
from pipelinerl.trainers.torch.mesh_worker import MeshWorker
from pipelinerl.trainers.torch.options import mesh_of
from trainer_contract.types import Float32, LossStats, MicroBatch, TrainerSpec


@final
class MeshFollower:
    """Implements `ranks.follower.RankWorker`; it returns the results of its own micro-batches to rank 0."""

    def __init__(self, spec: TrainerSpec) -> None:
        self._worker = MeshWorker.started(spec, mesh_of(spec.options))

    def execute(self, command: Command) -> list[RankResult]:
        """Run the same worker method as rank 0."""
        worker = self._worker
        match command:
            case ForwardCommand():
                return [_result(each) for each in worker.forward(_batches(command), command.rounds)]
            case ForwardAt():
                return [_result(each) for each in worker.forward_at(_batches(command), command.rounds, None)]
            case Backward():
                objective = decode_objective(command.objective)
                return [_result(each) for each in worker.backward(_batches(command), command.rounds, objective)]
            case StepCommand():
                worker.optimizer_step(command.learning_rate)
            case Discard():
                worker.model.discard_gradient()
            case Gather():
                worker.deliver(range(command.place, command.place + command.count), command.kind, command.into)
            case Save():
                worker.save_shard(Path(command.path))
        return []


def _batches(command: ForwardCommand | ForwardAt | Backward) -> list[MicroBatch]:
    return [decode_batch(columns) for columns in command.batches]


def _result(found: Float32 | LossStats) -> RankResult:
    if isinstance(found, LossStats):
        return RankResult(found.predictions.tobytes(), found.loss)
    return RankResult(found.tobytes())
