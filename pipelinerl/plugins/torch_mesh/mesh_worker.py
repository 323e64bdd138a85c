"""`MeshWorker`, one process's part of a multi-process torch trainer, the same on every rank.

Every rank makes the same passes in the same order, because the ranks gather each layer together. A rank without a
micro-batch in a round computes two dummy tokens. An all-reduce before each backward pass makes all ranks abandon the
micro-batches of a call if any loss is not finite. `received`, `deliver` and `save_shard`, which only read, run on the
thread of `Lane.READS`, all other methods on the thread of `Lane.PASSES`. `MeshLeader` calls the worker on rank 0,
`MeshFollower` on the other ranks.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from pipelinerl import rng
from pipelinerl.numerics.dither_torch import rounded
from pipelinerl.plugins.torch_mesh.joining import in_agreement, join, world
from pipelinerl.plugins.torch_mesh.sharded_model import ShardedModel
from pipelinerl.trainers.ranks import commands as wire
from pipelinerl.trainers.ranks.follower import Start
from pipelinerl.trainers.ranks.rendezvous import Distributed, Join
from pipelinerl.trainers.ranks.shared_block import Block, Place, opened, write_at
from pipelinerl.trainers.torch import state as torch_state
from pipelinerl.trainers.torch.adamw import ParameterOptimizer, adamw, dtype_of, restored_state
from pipelinerl.trainers.torch.loading import LoadedModel, load, refuse_device
from pipelinerl.trainers.torch.mesh import ExpertWeights, GradientSum, ProcessMesh, device_index, refuse_heads
from pipelinerl.trainers.torch.options import TorchOptions, distributed_of, options_of, share_of
from pipelinerl.trainers.torch.packed.planner import planning
from pipelinerl.trainers.torch.passes import PassSetting, broken_loss, evaluate, made_up_batch, predict, predicted
from pipelinerl.trainers.torch.state import VALUE, key_of, write_shard
from trainer_contract.errors import NonFiniteError, RankError, SpecError
from trainer_contract.types import (
    Device,
    Float32,
    Head,
    HostWeights,
    LossStats,
    MicroBatch,
    Objective,
    ParameterInfo,
    Precision,
    StepStats,
    TrainerSpec,
)

log = logging.getLogger("pipelinerl")
dist: Any = torch.distributed
#: Maximum number of parameters whose rows a rank sends to rank 0 at the same time.
_SENT_AT_ONCE: Final = 2
#: A rank contributes this value to the all-reduce before backward if its loss is finite, and else its micro-batch's
#: number, which is smaller. The minimum over all ranks is thus the first bad micro-batch.
_SOUND: Final = torch.iinfo(torch.int32).max


class HostBuffer:
    """Reusable pinned host memory for copies from the device, one tensor at a time; it grows as needed."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def fetch(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy values to the host in `dtype`; the result may share this buffer, which the next call overwrites."""
        if values.device.type == "cpu":
            return values.to(dtype)
        sent = values.to(dtype) if dtype.itemsize < values.dtype.itemsize else values
        size = sent.numel() * sent.element_size()
        if len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=values.is_cuda)
        held = self._memory[:size].view(sent.dtype).view(sent.shape)
        held.copy_(sent)
        return held.to(dtype)


@dataclass(slots=True)
class MeshWorker:
    """One process's shards, their optimizer, and the passes over them."""

    spec: TrainerSpec
    options: TorchOptions
    rank: int
    setting: PassSetting
    model: ShardedModel
    loaded: LoadedModel
    optimizer: ParameterOptimizer
    random: torch_state.RandomState
    model_version: int = 0
    #: Host memory for rows: one buffer for each parameter in transit to rank 0; `save_buffer` is for saving, on another
    #: thread.
    buffers: tuple[HostBuffer, ...] = field(default_factory=lambda: tuple(HostBuffer() for _ in range(_SENT_AT_ONCE)))
    save_buffer: HostBuffer = field(default_factory=HostBuffer)

    @property
    def mesh(self) -> ProcessMesh:
        return self.options.mesh

    @classmethod
    def started(cls, spec: TrainerSpec, options: TorchOptions) -> MeshWorker:
        """Load the model and keep this rank's rows; restore its rows of the optimizer's state if a state was saved."""
        mesh, rank = options.mesh, world().rank
        compute = torch.bfloat16 if spec.precision is Precision.BF16 else torch.float32
        with in_agreement():
            refuse_device(spec.device)
            device = _device(spec)
            loaded = load(spec)
            text = loaded.config.get_text_config()
            refuse_heads(text.num_attention_heads, mesh.cp)
            attention = planning(
                *(options.attention, spec.precision, device, text.to_dict(), spec.kernels),
                packs=loaded.model.packs,
                cp=mesh.cp,
                agree=partial(_most, device=device),
            )
        if rank == 0:
            log.info("attention: %s", attention.description)
            if loaded.adapters is not None:
                log.info("LoRA: %s", share_of(*loaded.adapters.counts))
        with in_agreement():
            model = _divided(loaded, mesh, options.experts, rank=rank, device=device, compute=compute)
        model.probe(loaded.products)
        shards = [shard for shard in model.trained.values() if shard.numel()]
        optimizer = adamw(shards, spec.optimizer, options.optimizer, seed=spec.seed, shard=rank % mesh.shards)
        read, random = loaded._replace(saved=None, reader=None), torch_state.RandomState.now()
        setting = PassSetting(device, attention.plan_of, model.group)
        worker = cls(spec, options, rank, setting, model, read, optimizer, random)
        with in_agreement():
            if loaded.saved is not None:
                worker._restore(loaded.saved)
        return worker

    def forward(self, batches: Sequence[MicroBatch], rounds: int) -> list[Float32]:
        """Return predictions, perhaps NaN, equal on ranks that share a micro-batch; `rounds` is equal on all ranks."""
        with self._computing_as_engines():
            return self._forward(batches, rounds)

    def _computing_as_engines(self) -> AbstractContextManager[None]:
        rounds = self.loaded.gather_dtype is not torch.float32 and self.spec.head is Head.POLICY
        if not rounds or self.loaded.adapters is not None:
            return nullcontext()
        return self.model.lent(
            self.base_names, lambda name: self._source(self.model.shards, name, wire.GatheredKind.WEIGHTS).detach()
        )

    def _forward(self, batches: Sequence[MicroBatch], rounds: int) -> list[Float32]:
        try:
            predictions = [predicted(self.model, self.setting, batch) for batch in batches]
            for _ in range(rounds - len(batches)):
                predicted(self.model, self.setting, made_up_batch(np.array([2]), vocab_size=1))
        finally:
            self.model.end_forward()
        return predictions

    def forward_at(self, batches: Sequence[MicroBatch], rounds: int, weights: HostWeights | None) -> list[Float32]:
        """Run `forward` with the given weights. Rank 0 sends them to the other ranks, which pass None."""
        adapters = self.loaded.adapters
        off = nullcontext() if adapters is None else adapters.off()  # the given weights already include merged adapters

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

        with off, self.model.lent(self.base_names, rows_of):
            return self._forward(batches, rounds)

    def backward(self, batches: Sequence[MicroBatch], rounds: int, objective: Objective) -> list[LossStats]:
        """Accumulate gradients of this rank's micro-batches. Raises NonFiniteError on every rank."""
        if self.loaded.adapters is None:
            with self._computing_as_engines():
                return self._backward(batches, rounds, objective)
        # Dropout depends on step and rank only, so a resumed run drops the same inputs.
        torch.manual_seed(rng.key(self.spec.seed, "adapter_dropout", self.model_version, self.rank))
        with self.loaded.adapters.dropping_out():
            return self._backward(batches, rounds, objective)

    def _backward(self, batches: Sequence[MicroBatch], rounds: int, objective: Objective) -> list[LossStats]:
        results = []
        for turn in range(rounds):
            self.model.begin_backward(is_last=self.options.gradients is GradientSum.DIVIDED or turn == rounds - 1)
            number, vote = turn * self.mesh.width + self.rank // self.mesh.cp, 0
            try:
                if turn < len(batches):
                    loss, stats = evaluate(self.model, self.setting, batches[turn], objective)
                    results.append(stats)
                else:
                    loss, stats = _zero_loss(self.model, self.setting), LossStats(0.0, np.zeros(0, np.float32))
                vote = _SOUND if math.isfinite(stats.loss) else number
            finally:  # do this even after an error, since the other ranks wait for this all-reduce
                numbers = torch.tensor(vote, dtype=torch.int32)
                dist.all_reduce(numbers, op=dist.ReduceOp.MIN)
                broken = int(numbers)
                if broken != _SOUND:
                    self._abandon_sequence(is_first=turn == 0)
            if broken != _SOUND:
                raise broken_loss(stats.loss if broken == number else math.nan, broken)
            loss.backward()
        return results

    def optimizer_step(self, learning_rate: float) -> StepStats:
        shards = self.model.collect_gradient()
        own = float(torch.nn.utils.get_total_norm(shard.grad for shard in shards if shard.grad is not None))
        norm = math.sqrt(self.model.summed_over_shards(own**2))
        if not math.isfinite(norm):
            self.model.discard_gradient()
            raise NonFiniteError(f"the gradient's norm is {norm}: it was cleared and the weights are unchanged")
        clip = self.spec.optimizer.grad_clip or math.inf
        torch.nn.utils.clip_grads_with_norm_(shards, clip, torch.tensor(norm, device=self.setting.device))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.model.end_step()
        self.model_version += 1
        self.random = torch_state.RandomState.now()
        return StepStats(self.model_version, norm, learning_rate)

    @property
    def base_names(self) -> list[str]:
        """The names of all parameters but those of adapters, in the model's order; `place_of` counts these first."""
        pairs = set() if self.loaded.adapters is None else self.loaded.adapters.trained.keys()
        return [name for name in self.model.shapes if name not in pairs or name in self.loaded.weights]

    def layout(self) -> tuple[ParameterInfo, ...]:
        dtype = str(self.loaded.gather_dtype).removeprefix("torch.")
        return tuple(ParameterInfo(name, tuple(self.model.shapes[name]), dtype) for name in self.base_names)

    def place_of(self, name: str) -> int:
        return list(self.model.shapes).index(name)

    def has_moments(self, name: str) -> bool:
        """Return True if the optimizer has moments of a parameter, which its first step with a gradient creates."""
        return self.model.shards[name] in self.optimizer.state

    def steps_of(self, name: str) -> Tensor:
        """Return AdamW's step count of a parameter; call this on rank 0, which has rows of every parameter."""
        count: Tensor = self.optimizer.state[self.model.shards[name]]["step"]
        return count

    def bytes_of(self, places: range, kind: wire.GatheredKind) -> int:
        """Return the size in bytes of the block that `received` needs for the parameters at these positions."""
        return sum(shape.numel() for shape in self._shapes(places).values()) * self._dtype_of(kind).itemsize

    def received(self, places: range, kind: wire.GatheredKind, block: Block) -> list[Tensor]:
        """On rank 0, gather the whole parameters at these positions (or their moments) into the block."""
        shapes, dtype = self._shapes(places), self._dtype_of(kind)
        flat = torch.from_numpy(block.memory).view(dtype)
        parts = torch.split(flat, [shape.numel() for shape in shapes.values()])
        wholes = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        far = [rank for rank in range(1, self.mesh.shards) if block.place is None or rank not in world().on_same_host]
        with _gathering(shapes):
            coming = [
                dist.irecv(_bytes(part), rank, group=world().reads)
                for whole in wholes.values()
                for rank in far
                if (part := whole[self.mesh.rows_of(rank, len(whole))]).numel()
            ]
            with self.model.last_step_shards() as shards:
                for name, whole in wholes.items():
                    self._copy(shards, name, kind, whole[self.mesh.rows_of(0, len(whole))], self.buffers[0])
            for each in coming:
                each.wait()
        return list(wholes.values())

    def deliver(self, places: range, kind: wire.GatheredKind, into: Place | None) -> None:
        """On a rank above 0 of the first model replica, send its rows of parameters (or moments) to rank 0, or write
        them into `into`, a block of a rank 0 on this host.
        """
        if self.rank >= self.mesh.shards:
            return
        shapes = self._shapes(places)
        with _gathering(shapes):
            if into is None or self.rank not in world().on_same_host:
                self._send(shapes, kind)
            else:
                begin, dtype = 0, self._dtype_of(kind)
                with opened(into) as file, self.model.last_step_shards() as shards:
                    for name, shape in shapes.items():
                        rows = self.buffers[0].fetch(self._source(shards, name, kind).detach(), dtype)
                        size = shape.numel() * dtype.itemsize
                        if rows.numel():
                            first = self.mesh.rows_of(self.rank, shape[0]).start
                            write_at(file, begin + first * (size // shape[0]), _bytes(rows).numpy())
                        begin += size

    def _send(self, shapes: Mapping[str, torch.Size], kind: wire.GatheredKind) -> None:
        free = list(self.buffers)
        going: deque[tuple[Any, Tensor, HostBuffer]] = deque()
        with self.model.last_step_shards() as shards:
            for name in shapes:
                if not free:
                    work, _, buffer = going.popleft()
                    work.wait()
                    free.append(buffer)
                rows = free[-1].fetch(self._source(shards, name, kind).detach(), self._dtype_of(kind))
                if rows.numel():
                    going.append((dist.isend(_bytes(rows), 0, group=world().reads), rows, free.pop()))
            for work, _, _ in going:
                work.wait()

    def _shapes(self, places: range) -> dict[str, torch.Size]:
        return dict(list(self.model.shapes.items())[places.start : places.stop])

    def save_shard(self, path: Path) -> None:
        """Write this rank's rows of weights and moments into a state's directory; only the first replica does so."""
        if self.rank >= self.mesh.shards:
            return
        tensors: dict[str, Tensor] = {}
        for name, shard in self.model.trained.items():
            kinds = (
                [wire.GatheredKind.MEAN, wire.GatheredKind.SQUARE] if self.has_moments(name) and shard.numel() else []
            )
            tensors |= {key_of(name, kind): self._rows(name, kind) for kind in kinds}
            tensors[key_of(name, VALUE)] = self._rows(name, wire.GatheredKind.MASTER)
        write_shard(path, self.rank, self.mesh.shards, tensors)

    def _rows(self, name: str, kind: wire.GatheredKind) -> Tensor:
        rows = torch.empty(self.model.shards[name].shape, dtype=self._dtype_of(kind))
        with self.model.last_step_shards() as shards:
            self._copy(shards, name, kind, rows, self.save_buffer)
        return rows

    def _copy(
        self, shards: Mapping[str, Tensor], name: str, kind: wire.GatheredKind, rows: Tensor, buffer: HostBuffer
    ) -> None:
        if rows.numel():
            rows.copy_(buffer.fetch(self._source(shards, name, kind).detach(), rows.dtype))

    def _source(self, shards: Mapping[str, Tensor], name: str, kind: wire.GatheredKind) -> Tensor:
        if kind is wire.GatheredKind.WEIGHTS:
            shape = self.model.shapes[name]
            first = self.mesh.rows_of(self.rank, shape[0]).start * (shape.numel() // max(1, shape[0]))
            return rounded(shards[name], self.loaded.gather_dtype, self.spec.rounding, name=name, first=first)
        if kind not in (wire.GatheredKind.MEAN, wire.GatheredKind.SQUARE) or not shards[name].numel():
            return shards[name]
        moment: Tensor = self.optimizer.state[self.model.shards[name]][str(kind)]
        return moment

    def _dtype_of(self, kind: wire.GatheredKind) -> torch.dtype:
        if kind in (wire.GatheredKind.MEAN, wire.GatheredKind.SQUARE):
            return dtype_of(self.options.optimizer)
        return self.loaded.gather_dtype if kind is wire.GatheredKind.WEIGHTS else torch.float32

    def _restore(self, saved: torch_state.TorchSavedState) -> None:
        shapes = {name: self.model.shapes[name] for name in self.model.trained}
        rows_of = partial(self.mesh.rows_of, self.rank)
        for name, moments in saved.moments(shapes, rows_of).items():
            shard = self.model.shards[name]
            if shard.numel():
                self.optimizer.state[shard] = restored_state(moments, shard, self.options.optimizer)
        self.model_version, self.random = saved.model_version, saved.random
        saved.random.restore()

    def _abandon_sequence(self, *, is_first: bool) -> None:
        """Drop all gradients of a call that ends early. After its first backward pass, `fully_shard` holds gradients
        that only another pass, with loss 0, reduces, so that they can be dropped.
        """
        self.model.abandon()
        if not is_first:
            self.model.begin_backward(is_last=True)
            _zero_loss(self.model, self.setting).backward()
            self.model.discard_gradient()


class MeshFollower:
    """A `RankWorker` that runs rank 0's commands in torch, and returns the results of its own micro-batches."""

    def __init__(self, spec: TrainerSpec) -> None:
        self._worker = MeshWorker.started(spec, options_of(spec.options))

    def execute(self, command: wire.Command) -> list[wire.RankResult]:
        worker = self._worker
        match command:
            case wire.ForwardCommand():
                return [_result(each) for each in worker.forward(_batches(command), command.rounds)]
            case wire.ForwardAt():
                return [_result(each) for each in worker.forward_at(_batches(command), command.rounds, None)]
            case wire.Backward():
                objective = wire.decode_objective(command.objective)
                return [_result(each) for each in worker.backward(_batches(command), command.rounds, objective)]
            case wire.StepCommand():
                worker.optimizer_step(command.learning_rate)
            case wire.Discard():
                worker.model.discard_gradient()
            case wire.Gather():
                worker.deliver(range(command.place, command.place + command.count), command.kind, command.into)
            case wire.Save():
                worker.save_shard(Path(command.path))
        return []


def _batches(command: wire.ForwardCommand | wire.ForwardAt | wire.Backward) -> list[MicroBatch]:
    return [wire.decode_batch(columns) for columns in command.batches]


def _result(result: Float32 | LossStats) -> wire.RankResult:
    if isinstance(result, LossStats):
        return wire.RankResult(result.predictions.tobytes(), result.loss)
    return wire.RankResult(result.tobytes())


@contextmanager
def _gathering(names: Iterable[str]) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise RankError(
            f"gathering {', '.join(names)} failed: {error}; a rank has died: start all ranks again"
        ) from error


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _most(number: int, *, device: torch.device) -> int:
    largest = torch.tensor(number, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def _zero_loss(model: ShardedModel, setting: PassSetting) -> Tensor:
    batch = made_up_batch(np.array([2]), vocab_size=1)
    return predict(model, setting, batch, batch.loss_mask).sum() * 0.0


def _device(spec: TrainerSpec) -> torch.device:
    if spec.device is Device.CPU or not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank is not None and not local_rank.isdecimal():
        raise SpecError(f"LOCAL_RANK must be a whole number, got {local_rank!r}; correct or unset it")
    number = None if local_rank is None else int(local_rank)
    device = torch.device("cuda", device_index(world().rank, world().views, torch.cuda.device_count(), number))
    torch.cuda.set_device(device)
    if spec.memory_share is not None:
        torch.cuda.set_per_process_memory_fraction(spec.memory_share)
    return device


def _divided(
    loaded: LoadedModel,
    mesh: ProcessMesh,
    experts: ExpertWeights,
    *,
    rank: int,
    device: torch.device,
    compute: torch.dtype,
) -> ShardedModel:
    """Shard the model and load this process's rows; the caller then calls `probe`. Raises SpecError or StateError."""
    loaded.compact()
    unread, named = loaded.unread, loaded.weights | loaded.trained
    model = ShardedModel(loaded.model, mesh, device=device, compute=compute, parameters=named, experts=experts)
    for name in unread:
        shard = model.shards[name].detach()
        if shard.numel():
            shard.copy_(loaded.values_of(name, mesh.rows_of(rank, model.shapes[name][0])))
    return model


def as_rank(options: Mapping[str, Any]) -> tuple[Distributed | None, Join, Start]:
    """Return where rank 0 is, and how a rank above 0 joins and follows it; raise `SpecError` for invalid options."""
    return distributed_of(options, options_of(options).mesh), join, MeshFollower
