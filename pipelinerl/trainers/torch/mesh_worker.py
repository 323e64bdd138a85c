"""`MeshWorker`: one process' part of a torch trainer of several, the same code on every rank.

Every rank makes the same passes in the same order: a rank without a micro-batch in a round computes two tokens for
nothing, since the others wait for its part of each layer. Before each backward the ranks agree, with 4 bytes, that no
loss is broken: one that left the round alone would leave the others waiting.

`gathered` is for the thread of reads, everything else for that of passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch
import torch.distributed
from torch import Tensor
from torch.optim import Optimizer

from pipelinerl.trainers.ranks.commands import GatheredKind
from pipelinerl.trainers.torch import state as torch_state
from pipelinerl.trainers.torch.joining import world
from pipelinerl.trainers.torch.loading import LoadedModel, adamw, load, refuse_device
from pipelinerl.trainers.torch.mesh import ProcessMesh
from pipelinerl.trainers.torch.passes import broken_loss, evaluate, predict, predicted
from pipelinerl.trainers.torch.sharded_model import ShardedModel
from trainer_contract.errors import NonFiniteError, RankError, SpecError
from trainer_contract.types import (
    Device,
    Float32,
    HostWeights,
    LossStats,
    MicroBatch,
    Objective,
    ParameterInfo,
    Precision,
    StepStats,
    TrainerSpec,
)

dist: Any = torch.distributed
#: What a rank whose loss is sound says before a backward: more than the number of any micro-batch.
_SOUND: Final = torch.iinfo(torch.int32).max


@final
@dataclass(slots=True)
class MeshWorker:
    """Shards, their optimizer, and the passes over them."""

    spec: TrainerSpec
    mesh: ProcessMesh
    rank: int
    device: torch.device
    model: ShardedModel
    loaded: LoadedModel
    optimizer: Optimizer
    random: torch_state.RandomState
    model_version: int = 0

    @classmethod
    def started(cls, spec: TrainerSpec, mesh: ProcessMesh) -> MeshWorker:
        """Load the model, keep this rank's rows of it; of a saved state the rows of the optimizer, too."""
        refuse_device(spec.device)
        device = _device(spec)
        loaded, rank = load(spec), world().rank
        loaded.move_to(device)
        if any(not parameter.requires_grad for parameter in loaded.model.parameters()):
            raise SpecError("options.mesh: a model with frozen parameters cannot be divided; train it in one process")
        compute = torch.bfloat16 if spec.precision is Precision.BF16 else torch.float32
        model = ShardedModel(loaded.model, mesh, device=device, compute=compute)
        optimizer = adamw([shard for shard in model.shards.values() if shard.numel()], spec.optimizer)
        worker = cls(
            spec, mesh, rank, device, model, loaded._replace(saved=None), optimizer, torch_state.RandomState.now()
        )
        if loaded.saved is not None:
            worker._restore(loaded.saved)
        return worker

    def forward(self, batches: Sequence[MicroBatch], rounds: int) -> list[Float32]:
        """The predictions of this rank's micro-batches, finite or not."""
        try:
            found = [predicted(self.model, self.device, batch) for batch in batches]
            for _ in range(rounds - len(batches)):
                predicted(self.model, self.device, _idle())
        finally:
            self.model.end_forward()
        return found

    def forward_at(self, batches: Sequence[MicroBatch], rounds: int, weights: HostWeights | None) -> list[Float32]:
        """`forward` with these weights, which rank 0 has and sends to the others; None on those."""
        with self.model.lent(self._sent(weights)):
            return self.forward(batches, rounds)

    def backward(self, batches: Sequence[MicroBatch], rounds: int, objective: Objective) -> list[LossStats]:
        """The losses of this rank's micro-batches, each with a token in its loss mask; the gradients are accumulated.

        Raises:
            NonFiniteError: on every rank; its `number` is of the first of the round, dealt one to each rank in turn.
        """
        found = []
        for turn in range(rounds):
            self.model.begin_backward(is_last=turn == rounds - 1)
            number, said = turn * self.mesh.size + self.rank, 0
            try:
                if turn < len(batches):
                    loss, stats = evaluate(self.model, self.device, batches[turn], objective)
                    found.append(stats)
                else:
                    loss, stats = _nothing(self.model, self.device), LossStats(0.0, np.zeros(0, np.float32))
                said = _SOUND if math.isfinite(stats.loss) else number
            finally:  # whatever was raised, the others are waiting for this
                broken = self._least(said)
                if broken != _SOUND:
                    self._forget(is_first=turn == 0)
            if broken != _SOUND:
                raise broken_loss(stats.loss if broken == number else math.nan, broken)
            loss.backward()
        return found

    def optimizer_step(self, learning_rate: float) -> StepStats:
        """Clip by the norm of all shards, apply, clear; every rank finds the same norm."""
        shards = self.model.collect_gradient()
        own = float(torch.nn.utils.get_total_norm(shard.grad for shard in shards if shard.grad is not None))
        norm = math.sqrt(self.model.summed_over_shards(own**2))
        if not math.isfinite(norm):
            self.model.discard_gradient()
            raise NonFiniteError(f"the gradient's norm is {norm}: it was cleared and the weights are as before")
        clip = self.spec.optimizer.grad_clip or math.inf
        torch.nn.utils.clip_grads_with_norm_(shards, clip, torch.tensor(norm, device=self.device))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.model.discard_gradient()
        self.model_version += 1
        self.random = torch_state.RandomState.now()
        return StepStats(self.model_version, norm, learning_rate)

    def layout(self) -> tuple[ParameterInfo, ...]:
        """Parameters in the model's order."""
        dtype = str(self.loaded.gather_dtype).removeprefix("torch.")
        return tuple(ParameterInfo(name, tuple(shape), dtype) for name, shape in self.model.shapes.items())

    @property
    def has_moments(self) -> bool:
        """Was there a step with a gradient?"""
        return bool(self.optimizer.state)

    def steps_of(self, name: str) -> Tensor:
        """AdamW's count of this parameter's steps; rank 0 has rows of each."""
        count: Tensor = self.optimizer.state[self.model.shards[name]]["step"]
        return count

    def gathered(self, place: int, kind: GatheredKind) -> Tensor | None:
        """On rank 0 the whole parameter at this place of the layout, or its moment; the others send their rows.

        One parameter is in memory at once, and only on rank 0; of several copies the first is read.
        """
        name, shape = list(self.model.shapes.items())[place]
        if self.rank >= self.mesh.dp_shard:
            return None
        rows = self._rows(name, kind)
        try:
            if self.rank:
                if rows.numel():
                    dist.send(_bytes(rows), 0, group=world().reads)
                return None
            whole = torch.empty(shape, dtype=rows.dtype)
            for rank in range(self.mesh.dp_shard):
                part = whole[self.mesh.rows_of(rank, shape[0])]
                if rank == 0:
                    part.copy_(rows)
                elif part.numel():
                    dist.recv(_bytes(part), rank, group=world().reads)
        except RuntimeError as error:
            raise RankError(f"gathering {name} failed: {error}; a rank has died: start all ranks again") from error
        return whole

    def _rows(self, name: str, kind: GatheredKind) -> Tensor:
        if kind in (GatheredKind.MEAN, GatheredKind.SQUARE):
            shard = self.model.shards[name]
            moment: Tensor = self.optimizer.state[shard][str(kind)] if shard.numel() else shard.detach()
            return moment.cpu()
        return self.model.copied(name, self.loaded.gather_dtype if kind is GatheredKind.WEIGHTS else torch.float32)

    def _sent(self, weights: HostWeights | None) -> Callable[[str], Tensor]:
        """What gives this rank's rows of each parameter, which rank 0 has whole and deals out."""

        def rows_of(name: str) -> Tensor:
            shape, dtype = self.model.shapes[name], self.loaded.gather_dtype
            if weights is None:
                rows = torch.empty(self.model.shards[name].shape, dtype=dtype)
                if rows.numel():
                    dist.recv(_bytes(rows), 0)
                return rows
            whole = torch.from_numpy(weights[name]).view(dtype).view(shape)
            for rank in range(1, self.mesh.size):
                part = whole[self.mesh.rows_of(rank, shape[0])]
                if part.numel():
                    dist.send(_bytes(part), rank)
            return whole[self.mesh.rows_of(0, shape[0])]

        return rows_of

    def _restore(self, saved: torch_state.TorchSavedState) -> None:
        for name, moments in saved.moments(self.model.shapes).items():
            shard = self.model.shards[name]
            if shard.numel():
                rows = self.mesh.rows_of(self.rank, self.model.shapes[name][0])
                self.optimizer.state[shard] = {
                    kind: (whole[rows].clone() if whole.ndim else whole.clone()).to(self.device if whole.ndim else None)
                    for kind, whole in moments.items()
                }
        self.model_version, self.random = saved.model_version, saved.random
        saved.random.restore()

    def _forget(self, *, is_first: bool) -> None:
        """End a sequence whose last backward will not come: what earlier ones accumulated is brought together, too."""
        self.model.abandon()
        if not is_first:
            self.model.begin_backward(is_last=True)
            _nothing(self.model, self.device).backward()
            self.model.discard_gradient()

    def _least(self, said: int) -> int:
        numbers = torch.tensor(said, dtype=torch.int32)
        dist.all_reduce(numbers, op=dist.ReduceOp.MIN)
        return int(numbers)


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of contiguous rows, on the host, in a dtype that every transport knows."""
    return tensor.view(-1).view(torch.uint8)


def _idle() -> MicroBatch:
    """Two tokens, for a rank that has no micro-batch."""
    nothing = np.zeros(2, np.float32)
    return MicroBatch(
        token_ids=np.zeros(2, np.int32),
        position_ids=np.arange(2, dtype=np.int32),
        segment_ids=np.zeros(2, np.int32),
        loss_mask=np.array([False, True]),
        advantages=nothing,
        weights=nothing,
        behavior_logprobs=nothing,
        temperatures=np.ones(2, np.float32),
        num_segments=1,
    )


def _nothing(model: ShardedModel, device: torch.device) -> Tensor:
    """A loss of which every gradient is 0."""
    batch = _idle()
    return predict(model, device, batch, batch.loss_mask).sum() * 0.0


def _device(spec: TrainerSpec) -> torch.device:
    """The launcher shows each process the one GPU that is its own."""
    if spec.device is Device.CPU or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    if spec.memory_share is not None:
        torch.cuda.set_per_process_memory_fraction(spec.memory_share)
    return device
