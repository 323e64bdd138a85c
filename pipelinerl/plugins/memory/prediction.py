"""The memory table of `pipelinerl check`: the memory of each process, whether it fits, and the knobs that would help.

Nothing heavy is imported and no weight is read. The memory of third-party trainers and engines, and of external
servers, cannot be predicted and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from pipelinerl import registry
from pipelinerl.config.recipe import RunConfig
from pipelinerl.engines.memory_budget import EngineBudget, budget_of, reserve_of
from pipelinerl.models.checkpoint import model_type
from pipelinerl.models.model_shape import BYTES, ModelShape, read_shape
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.plugins.memory.trainer_memory import TrainerMemory
from pipelinerl.roles.dtypes import dtypes_of, on_accelerator
from pipelinerl.roles.wiring import is_url, references_of
from pipelinerl.trainers.torch.mesh import GradientSum
from pipelinerl.trainers.torch.options import LoraOptions, MomentDType, StatePlace, options_of, share_of
from trainer_contract.types import Precision, WeightDType

_ENGINES: Final = frozenset({"torch", "jax", "vllm"})
_SHARDS: Final = (2, 4, 8, 16, 32, 64)
#: Bits of a quantised weight by format; the scale of each row is neglected.
_BITS: Final = {"int8": 8, "int4": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Memory of an engine on `devices`, which decodes up to `slots` sequences of `context` tokens at once.

    With `staged_on_host`, as in vLLM, weight updates arrive in the host's memory, so the device holds the weights only
    once. `reserve` is the number of bytes that it leaves unplanned on each device.
    """

    shape: ModelShape
    dtype: WeightDType
    wire: WeightDType
    slots: int
    context: int
    weights: str = "native"
    devices: int = 1
    staged_on_host: bool = False
    reserve: int = 0

    @property
    def parts(self) -> Mapping[str, int]:
        """Bytes on each device, by purpose (weights, receive buffer, …)."""
        weights, budget = self._weights, self._budget
        sizes = {
            "weights": weights,
            "receive buffer": 0 if self.staged_on_host else budget.staging + budget.conversion,
            "keys and values": budget.cache,
            "states": budget.states,
            "workspace": budget.prefill + budget.logits,
        }
        on_each = {name: -(-each // self.devices) for name, each in sizes.items()} | {"reserve": self.reserve}
        return {name: each for name, each in on_each.items() if each}

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def least(self) -> int:
        """Bytes on each device with a KV cache for one sequence, the least that an engine needs to start."""
        cache = self.parts.get("keys and values", 0)
        return self.total - cache + -(-self._budget.sequence // self.devices)

    @property
    def _saved(self) -> int:
        """Bytes that the quantisation of linear layers saves."""
        linear = sum(map(math.prod, self.shape.linear.values()))
        return linear * (8 * BYTES[self.dtype] - _BITS[self.weights]) // 8 if self.weights in _BITS else 0

    @property
    def _weights(self) -> int:
        return self.shape.count * BYTES[self.dtype] - self._saved

    @property
    def _budget(self) -> EngineBudget:
        return budget_of(
            self.shape,
            dtype=self.dtype,
            wire=self.wire,
            slots=self.slots,
            context=self.context,
            received=self.shape.count * BYTES[self.dtype],
            spare=self._weights if self._saved else 0,
        )

    @property
    def host(self) -> int:
        """Bytes of host memory, which all processes of the engine share."""
        if not self.staged_on_host:
            return 0
        converted = self.shape.count * BYTES[self.wire] if self.wire is not self.dtype else 0
        return self.shape.count * BYTES[self.dtype] + converted


@dataclass(frozen=True, slots=True)
class MemoryPrediction:
    """Memory of one trainer process and of one engine (None if unpredictable), and the number of engines."""

    trainer: TrainerMemory | None
    engine: EngineMemory | None
    engines: int

    @property
    def by_process(self) -> dict[str, TrainerMemory | EngineMemory]:
        memory = {"trainer": self.trainer, "engine": self.engine}
        return {kind: its for kind, its in memory.items() if its is not None}

    def within(self, limits: Mapping[str, int]) -> dict[str, TrainerMemory | EngineMemory]:
        """Return `by_process`, with an engine's reserve if `limits` has a limit in bytes for engines."""
        memory, limit, engine = self.by_process, limits.get("engine"), self.engine
        if limit is not None and engine is not None and not engine.staged_on_host:
            memory["engine"] = replace(engine, reserve=reserve_of(limit))
        return memory

    @property
    def total(self) -> int:
        """Bytes of all processes together, for a machine without GPUs, whose memory all processes share."""
        trainer, engine = self.trainer, self.engine
        trainers = 0 if trainer is None else (trainer.total + trainer.host) * trainer.shards
        return trainers + (0 if engine is None else (engine.total + engine.host) * self.engines)


def predict(config: RunConfig, objective: PolicyObjective) -> MemoryPrediction:
    """Predict the memory of a recipe that `check` has accepted; raise `ModelError` if the model has unknown sizes."""
    path = config.model.resolved
    if registry.has_own_type(model_type(path)):
        return MemoryPrediction(None, None, 0)
    shape = read_shape(path)
    return MemoryPrediction(_trainer(config, shape, objective), _engine(config, shape), config.engine.count)


def _trainer(config: RunConfig, shape: ModelShape, objective: PolicyObjective) -> TrainerMemory | None:
    section = config.trainer
    if section.type != "torch":
        return None
    options, longest = options_of(section.options), config.engine.context_length
    lora, mesh, optimizer = options.lora, options.mesh, options.optimizer
    tokens = max(longest, min(section.token_budget, longest * config.training.rollouts_per_step))
    answer_share = min(1.0, config.sampling.max_tokens / longest)
    return TrainerMemory(
        shape=shape,
        precision=section.passes_in,
        tokens=tokens,
        trained=max(1, int(tokens * answer_share)),
        checkpointing=section.gradient_checkpointing,
        rank=0 if lora is None else lora.rank,
        targets=None if lora is None else lora.targets,
        shards=mesh.shards,
        cp=mesh.cp,
        wire=dtypes_of(config).wire,
        values="values" in objective.passes,
        references=sum(not is_url(place) for place in set(references_of(config, objective).values())),
        moments=optimizer.moments,
        place=optimizer.place,
        gradients=options.gradients,
        on_gpu=on_accelerator(section.device),
    )


def _engine(config: RunConfig, shape: ModelShape) -> EngineMemory | None:
    section, dtypes = config.engine, dtypes_of(config)
    if section.type not in _ENGINES:
        return None
    return EngineMemory(
        shape=replace(shape, cache=shape.cache.whole) if section.type == "jax" else shape,
        dtype=dtypes.engine,
        wire=dtypes.wire,
        slots=section.slots,
        context=section.context_length,
        weights=section.weights.value,
        devices=section.devices,
        staged_on_host=section.type == "vllm",
    )


def trainable(prediction: MemoryPrediction) -> str | None:
    """Return a line such as `LoRA: 1.2 M of 135 M parameters train`; None without LoRA or without a prediction."""
    trainer = prediction.trainer
    if trainer is None or not trainer.rank:
        return None
    return f"LoRA: {share_of(trainer.adapters, trainer.shape.count)}"


def lines(prediction: MemoryPrediction, *, limits: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for each process, and a second line with advice if the process exceeds its limit in bytes.

    The keys of `limits` are kinds of process; the key `all` limits the sum of all processes, on a machine without GPUs.
    """
    for kind, its in prediction.within(limits).items():
        limit = limits.get(kind)
        parts = ", ".join(f"{name} {gib(size)}" for name, size in its.parts.items())
        on_host = f"; {gib(its.host)} on the host" if its.host else ""
        yield f"{kind}: {gib(its.total)}" + (f" of {gib(limit)}" if limit else "") + f" at the peak ({parts}){on_host}"
        if limit is not None and its.least <= limit < its.total:
            left = its.parts.get("keys and values", 0) - (its.total - limit)
            yield f"{kind}: keys and values take what is left of {gib(limit)}, {gib(left)}"
        elif limit is not None and its.total > limit:
            changes = _trainer_changes(its) if isinstance(its, TrainerMemory) else _engine_changes(its)
            advice = _advice(((name, changed.total) for name, changed in changes), limit)
            yield f"{kind}: more than the {gib(limit)} that it has; {advice}"
    limit = limits.get("all")
    if limit is not None and prediction.total > limit:
        yield (
            f"all processes together: {gib(prediction.total)}, more than the {gib(limit)} of this machine; "
            f"{_advice(_changes(prediction), limit)}"
        )


def fits(prediction: MemoryPrediction, *, limits: Mapping[str, int]) -> bool:
    """Return True if every process can start within its own limit, and their sum is within the limit `all`."""
    each = [its.least <= limits.get(kind, its.least) for kind, its in prediction.within(limits).items()]
    return all(each) and prediction.total <= limits.get("all", math.inf)


def _advice(changes: Iterable[tuple[str, int]], limit: int) -> str:
    """Return advice: for each key, the smallest change that alone makes the process fit.

    If no single change is enough, name the one that saves most. `changes` has the recipe's `key=value` of each change,
    and the bytes that the process then needs.
    """
    tried = list(changes)
    # For each key of the recipe, the smallest change of the key with which the process fits.
    enough: dict[str, str] = {}
    for name, total in tried:
        if total <= limit:
            enough.setdefault(name.partition("=")[0], f"{name} ({gib(total)})")
    if enough:
        return f"it would fit with {', or with '.join(enough.values())}"
    if not tried:
        return "use a larger device"
    name, least = min(tried, key=lambda each: each[1])
    return f"no single knob is enough; the best is {name} ({gib(least)}): change several, or use more devices"


def _changes(prediction: MemoryPrediction) -> Iterator[tuple[str, int]]:
    if (trainer := prediction.trainer) is not None:
        for name, fewer in _trainer_changes(trainer):
            if fewer.shards == trainer.shards:
                yield name, replace(prediction, trainer=fewer).total
    if prediction.engine is not None:
        for name, smaller in _engine_changes(prediction.engine):
            yield name, replace(prediction, engine=smaller).total


def _engine_changes(engine: EngineMemory) -> Iterator[tuple[str, EngineMemory]]:
    for slots in _halves(engine.slots, 8):
        yield f"engine.slots={slots}", replace(engine, slots=slots)
    if engine.dtype is WeightDType.FLOAT32:
        yield "engine.dtype=bfloat16", replace(engine, dtype=WeightDType.BFLOAT16)


def _trainer_changes(trainer: TrainerMemory) -> Iterator[tuple[str, TrainerMemory]]:
    if not trainer.checkpointing:
        yield "trainer.gradient_checkpointing=true", replace(trainer, checkpointing=True)
    for tokens in _halves(trainer.tokens, 1024):
        share = tokens / trainer.tokens
        fewer = replace(trainer, tokens=tokens, trained=max(1, int(trainer.trained * share)))
        yield f"trainer.micro_batch_tokens={tokens}", fewer
    if trainer.precision is Precision.FP32:
        yield "trainer.precision=bf16", replace(trainer, precision=Precision.BF16)
    if trainer.place is StatePlace.DEVICE:
        if trainer.moments is MomentDType.FP32:
            yield "trainer.options.optimizer.moments=bf16", replace(trainer, moments=MomentDType.BF16)
        yield "trainer.options.optimizer.place=host", replace(trainer, place=StatePlace.HOST)
    if not trainer.rank and trainer.shards == 1:
        rank = LoraOptions().rank
        yield f"trainer.options.lora.rank={rank}", replace(trainer, rank=rank)
    if trainer.shards > 1 and trainer.gradients is GradientSum.WHOLE:
        yield "trainer.options.gradients=divided", replace(trainer, gradients=GradientSum.DIVIDED)
    for shards in _SHARDS:
        if shards > trainer.shards and trainer.cp == 1:
            yield f"trainer.options.mesh.dp_shard={shards}", replace(trainer, shards=shards)
        if trainer.shards == 1 and trainer.shape.heads % shards == 0:
            yield f"trainer.options.mesh.cp={shards}", replace(trainer, shards=shards, cp=shards)


def _halves(number: int, least: int) -> Iterator[int]:
    while (number := number // 2) >= least:
        yield number


def gib(size: int) -> str:
    """Format bytes as `3.1 GiB`, or `12 MiB` below one GiB."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"
