"""`MeshLeader`, rank 0 of a multi-process torch trainer: it distributes micro-batches and combines the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from torch import Tensor

from pipelinerl.numerics.dither_torch import rounded
from pipelinerl.plugins.torch_mesh.joining import join
from pipelinerl.plugins.torch_mesh.mesh_worker import MeshWorker
from pipelinerl.trainers.ranks import commands as wire
from pipelinerl.trainers.ranks.rank0 import TRAINER_NUMBERS, Ranks, lead, one_ahead
from pipelinerl.trainers.ranks.rendezvous import Distributed
from pipelinerl.trainers.ranks.shared_block import RecycledMemory
from pipelinerl.trainers.torch import state as torch_state
from pipelinerl.trainers.torch.loading import LoadedModel
from pipelinerl.trainers.torch.lora import Adapters
from pipelinerl.trainers.torch.options import TorchOptions
from pipelinerl.trainers.torch.passes import require_finite
from pipelinerl.trainers.torch.state import write_index
from trainer_contract.errors import NonFiniteError, RankError, TrainerError
from trainer_contract.types import (
    Float32,
    HostWeights,
    LossStats,
    MicroBatch,
    Objective,
    ParameterInfo,
    StepStats,
    TrainerSpec,
)

T = TypeVar("T")


class MeshLeader:
    """Rank 0's shards and its connections to the other ranks. `TorchTrainer` has checked all arguments."""

    def __init__(self, ranks: Ranks, number: int, worker: MeshWorker) -> None:
        self._ranks = ranks
        self._number = number
        self._worker = worker
        self.has_gradient = False

    @classmethod
    def started(cls, spec: TrainerSpec, options: TorchOptions, distributed: Distributed) -> MeshLeader:
        ranks, number, plain = lead(distributed, join), next(TRAINER_NUMBERS), wire.encode_spec(spec)
        begin = partial(MeshWorker.started, spec, options)
        try:
            worker = ranks.together(lambda _: wire.StartCommand(number, plain), begin, lane=wire.Lane.PASSES).own
        except RankError:
            raise
        except TrainerError:  # some ranks may have loaded the model; free it
            ranks.drop(number)
            raise
        return cls(ranks, number, worker)

    @property
    def spec(self) -> TrainerSpec:
        return self._worker.spec

    @property
    def loaded(self) -> LoadedModel:
        return self._worker.loaded

    @property
    def model_version(self) -> int:
        return self._worker.model_version

    @property
    def width(self) -> int:
        """The number of micro-batches computed at once: one per process, or one per `cp` processes that share it."""
        return self._worker.mesh.width

    def forward(self, batches: Sequence[MicroBatch]) -> list[Float32]:
        return self._predictions(batches, wire.ForwardCommand, self._worker.forward)

    def forward_at(self, batches: Sequence[MicroBatch], weights: HostWeights) -> list[Float32]:
        return self._predictions(batches, wire.ForwardAt, partial(self._worker.forward_at, weights=weights))

    def backward(self, batches: Sequence[MicroBatch], objective: Objective) -> list[LossStats]:
        """Accumulate gradients on all ranks. The backward pass of the last round sums the gradients over the ranks."""
        losses = [LossStats(0.0, np.zeros(batch.num_tokens, np.float32)) for batch in batches]
        numbers = [number for number, batch in enumerate(batches) if batch.loss_mask.any()]
        try:
            computed = self._distribute(
                [batches[number] for number in numbers],
                partial(wire.Backward, objective=wire.encode_objective(objective)),
                partial(self._worker.backward, objective=objective),
                _loss,
            )
        except NonFiniteError as error:
            self.has_gradient = False
            number = None if error.number is None else numbers[error.number]
            raise NonFiniteError(str(error), number=number) from error
        for number, loss in zip(numbers, computed, strict=True):
            losses[number] = loss
        self.has_gradient = True
        return losses

    def optimizer_step(self, learning_rate: float) -> StepStats:
        self.has_gradient = False
        return self._all(
            wire.StepCommand(self._number, learning_rate), lambda: self._worker.optimizer_step(learning_rate)
        )

    def discard_gradient(self) -> None:
        self.has_gradient = False
        self._all(wire.Discard(self._number), self._worker.model.discard_gradient)

    def weight_layout(self) -> tuple[ParameterInfo, ...]:
        return self._worker.layout()

    def gather_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield host tensors, gathered on demand: while the caller reads some parameters, the next are gathered."""
        layout, adapters = self._worker.layout(), self._worker.loaded.adapters
        if adapters is not None:
            for info in layout:
                yield info.name, self._merged(info.name, adapters)
            return
        most = self._worker.model.at_once
        memory = RecycledMemory(most * self._worker.loaded.gather_dtype.itemsize)
        bunches = [[info.name for info in bunch] for bunch in grouped_parameters(layout, most)]
        begun = (self._begun(names, wire.GatheredKind.WEIGHTS, memory) for names in bunches)
        with closing(one_ahead(begun)) as gathered:
            for names, tensors in zip(bunches, gathered, strict=True):
                for name in names:
                    yield name, tensors.pop(0)

    def save_state(self, path: Path) -> None:
        """Save the state: each rank of the first replica writes its rows; with adapters, rank 0 writes everything."""
        worker, adapters = self._worker, self._worker.loaded.adapters
        if adapters is not None:
            trained = {name: self._gathered([name], wire.GatheredKind.MASTER)[0] for name in worker.model.trained}
            adapters.save(path / torch_state.ADAPTER, base=worker.spec.model_path, values=trained)
        else:
            command, own = wire.Save(self._number, str(path.absolute())), partial(worker.save_shard, path)
            self._ranks.together(lambda _: command, own, lane=wire.Lane.READS)
            write_index(path, worker.mesh.shards, worker.model.shapes)
        moments: dict[str, dict[str, Tensor]] = {}
        for name in filter(worker.has_moments, worker.model.trained):
            moments[name] = {"step": worker.steps_of(name)}
            if adapters is not None:
                for kind in (wire.GatheredKind.MEAN, wire.GatheredKind.SQUARE):
                    moments[name][str(kind)] = self._gathered([name], kind)[0]
        torch_state.save(
            path,
            config=worker.loaded.config,
            random=worker.random,
            head=worker.spec.head,
            moments=moments,
            model_version=worker.model_version,
            lora=None if adapters is None else adapters.record(digest=worker.loaded.base_digest),
        )

    def close(self) -> None:
        self._ranks.drop(self._number)

    def _predictions(
        self,
        batches: Sequence[MicroBatch],
        command: Callable[[int, list[wire.Columns], int], wire.Command],
        own: Callable[[list[MicroBatch], int], list[Float32]],
    ) -> list[Float32]:
        predictions = [np.zeros(batch.num_tokens, np.float32) for batch in batches]
        numbers = [number for number, batch in enumerate(batches) if (batch.position_ids > 0).any()]
        computed = self._distribute([batches[number] for number in numbers], command, own, _predicted)
        for number, each in zip(numbers, computed, strict=True):
            require_finite(each)
            predictions[number] = each
        return predictions

    def _distribute(
        self,
        batches: Sequence[MicroBatch],
        command: Callable[[int, list[wire.Columns], int], wire.Command],
        own: Callable[[list[MicroBatch], int], list[T]],
        decoded: Callable[[wire.RankResult], T],
    ) -> list[T]:
        """Compute micro-batches on all ranks, `width` per round; return results in order. `command` makes another
        rank's command from this trainer's number, its micro-batches and the rounds; `decoded` reads its result.
        """
        if not batches:
            return []
        width, cp, rounds = self.width, self._worker.mesh.cp, -(-len(batches) // self.width)
        mine, others = self._ranks.together(
            lambda rank: command(
                self._number, [wire.encode_batch(batch) for batch in batches[rank // cp :: width]], rounds
            ),
            lambda: own(list(batches[::width]), rounds),
            lane=wire.Lane.PASSES,
        )
        results = dict(zip(range(0, len(batches), width), mine, strict=True))
        for rank, answers in others.items():
            if rank % cp == 0:  # the ranks that share a micro-batch return the same results
                places = range(rank // cp, len(batches), width)
                results |= zip(places, map(decoded, answers), strict=True)
        return [results[number] for number in range(len(batches))]

    def _all(self, command: wire.Command, own: Callable[[], T]) -> T:
        return self._ranks.together(lambda _: command, own, lane=wire.Lane.PASSES).own

    def _merged(self, name: str, adapters: Adapters) -> Tensor:
        pair = adapters.pair_of(name)
        if pair is None:
            return self._gathered([name], wire.GatheredKind.WEIGHTS)[0]
        own, a, b = (self._gathered([each], wire.GatheredKind.MASTER)[0] for each in (name, *pair))
        merged = adapters.merged_with(name, own, a, b)
        return rounded(merged, self._worker.loaded.gather_dtype, self._worker.spec.rounding, name=name)

    def _gathered(self, names: Sequence[str], kind: wire.GatheredKind) -> list[Tensor]:
        return self._begun(names, kind, RecycledMemory(0))()

    def _begun(
        self, names: Sequence[str], kind: wire.GatheredKind, memory: RecycledMemory
    ) -> Callable[[], list[Tensor]]:
        first = self._worker.place_of(names[0])
        places = range(first, first + len(names))
        block = memory.take(self._worker.bytes_of(places, kind))
        command = wire.Gather(self._number, first, kind, len(names), block.place)
        ended = self._ranks.begin(
            lambda _: command, partial(self._worker.received, places, kind, block), lane=wire.Lane.READS
        )
        return lambda: ended().own


def grouped_parameters(layout: Sequence[ParameterInfo], most: int) -> Iterator[list[ParameterInfo]]:
    """Group adjacent parameters up to `most` elements in total, so that few commands gather many small ones."""
    bunch: list[ParameterInfo] = []
    held = 0
    for info in layout:
        size = math.prod(info.shape)
        if bunch and held + size > most:
            yield bunch
            bunch, held = [], 0
        bunch.append(info)
        held += size
    yield bunch


def _predicted(result: wire.RankResult) -> Float32:
    return np.frombuffer(result.predictions, np.float32)


def _loss(result: wire.RankResult) -> LossStats:
    return LossStats(result.loss, _predicted(result))
