"""Sections of a recipe: what samples, what trains, how a run is carried; `config` puts the whole together."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from inference_contract.weights import Backend, BaseUrl, OnUpdate, Transport
from pipelinerl.enums import (
    COLDEST,
    HOTTEST,
    Announce,
    Elasticity,
    Overdue,
    Receiver,
    RoutingReplay,
    StalenessScope,
    WeightFormat,
)
from pipelinerl.errors import RecipeError
from pipelinerl.staleness import PRESETS, StalenessBounds
from pipelinerl.system.files import from_home
from pipelinerl.types import Sampling
from trainer_contract.types import Device, HeadPrecision, OptimizerSpec, Precision, Rounding, WeightDType

MODELS = Path(__file__).resolve().parents[1] / "models"


class Section(BaseModel):
    """Base of every section: immutable and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


def shared_values(section: Section, settings: type[Any]) -> dict[str, Any]:
    """The values that a section and the dataclass `settings` call by the same names: it takes them as they are."""
    names = [field.name for field in fields(settings) if field.name in type(section).model_fields]
    return {name: getattr(section, name) for name in names}


class RunSection(Section):
    """What the run is called, where it writes and when it ends."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "run"
    directory: Path = Path("runs")
    seed: int = Field(default=0, ge=0, lt=2**31)
    steps: int = Field(default=100, ge=1)
    until_accuracy: float | None = Field(default=None, gt=0, le=1)
    """End early once an evaluation reaches this held-out accuracy."""
    stall_s: float = Field(default=120.0, gt=0)
    """When nothing has got on for so long, an event and the controller's log say what the run waits for."""
    no_signal_steps: int = Field(default=20, ge=1)
    """After so many steps' worth of groups without signal in a row there is an alarm at half of them, and where such
    groups are dropped the run ends: as solved, or as hopeless."""
    engine_timeout_s: float = Field(default=300.0, gt=0)
    """The run ends, its state saved, when no engine has been alive for so long."""


class ModelSection(Section):
    """The policy to start from: a local Hugging Face directory, or `shipped:<name>`."""

    path: str
    head_precision: HeadPrecision = HeadPrecision.MODEL
    """Arithmetic of the output layer, in engine and trainer alike: as the rest, or `fp32` (MiniMax-M1)."""

    @property
    def resolved(self) -> Path:
        """The directory that `path` names, a shipped model or one in the file system."""
        name = self.path.removeprefix("shipped:")
        return MODELS / name if name != self.path else from_home(self.path)


#: Above 0 and at most 1.
MemoryShare = Annotated[float, Field(gt=0, le=1)]

#: Places in the list of the GPUs that the run may use.
DeviceIndices = tuple[Annotated[int, Field(ge=0)], ...]


class EngineSection(Section):
    """The inference servers: their type, how many, and what each may hold."""

    type: str = "torch"
    count: int = Field(default=1, ge=1)
    slots: int = Field(default=128, ge=1)
    max_waiting: int = Field(default=4096, ge=1)
    context_length: int = Field(default=512, ge=2)
    dtype: Literal["auto"] | WeightDType = "auto"
    """The type of weights, cache and arithmetic; `auto`: float32 on a CPU, else the model directory's."""
    weights: WeightFormat = WeightFormat.NATIVE
    """How linear layers are kept: as they come, or quantised (`int8`)."""
    device: Device = Device.AUTO
    devices: int = Field(default=1, ge=1)
    """How many devices share one engine's model (types jax and vllm)."""
    servers: tuple[BaseUrl, ...] = ()
    """Base URLs of the servers that engines of the types vllm_server and sglang_server stand for, one for each."""
    memory_share: MemoryShare | None = None
    """Most of each GPU's memory that one engine takes; by default what `launch/placement.py` divides, or all."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options that this type of engine alone knows and checks: for vllm, fields of its `AsyncEngineArgs`."""
    on_update: OnUpdate = OnUpdate.CONTINUE
    receiver: Receiver = Receiver.IN_PROCESS
    """Which process is in the weight group: the engine's, or one that may die of what a peer sends (`own_process`)."""


class ActorSection(Section):
    """Loops around the engines.

    What an engine samples reaches the actor every `stream_interval_s`, so that another can go on with it; with 0 an
    answer comes when it is whole, and an engine that dies takes what it had with it.
    """

    count: int = Field(default=1, ge=1)
    groups_in_flight: int | None = Field(default=None, ge=1)
    """Groups of each actor at a time; by default twice what fills the engines' slots."""
    attempts: int = Field(default=4, ge=1)
    timeout_s: float = Field(default=300.0, gt=0)
    stream_interval_s: float = Field(default=1.0, ge=0, le=3600)


class SamplingSection(Section):
    """How training rollouts are sampled."""

    group_size: int = Field(default=16, ge=1)
    temperature: float = Field(default=1.0, ge=COLDEST, le=HOTTEST)
    top_p: float = Field(default=1.0, ge=1e-6, le=1)
    top_k: int = Field(default=0, ge=0, lt=2**31)
    max_tokens: int = Field(default=256, ge=1)
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()

    @property
    def of_an_order(self) -> Sampling:
        """How a training order is sampled."""
        return Sampling(num_samples=self.group_size, **self.model_dump(exclude={"group_size"}))


#: At least 0 and below 1.
Fraction = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSection(Section):
    """AdamW and the learning-rate schedule."""

    learning_rate: float = Field(default=1e-6, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float = Field(default=1.0, ge=0)

    @property
    def spec(self) -> OptimizerSpec:
        """The trainer's part: all but the schedule, which is the training loop's."""
        return OptimizerSpec(**shared_values(self, OptimizerSpec))


#: What `trainer.micro_batch_tokens = "auto"` takes where memory allows.
MOST_TOKENS = 16384


class TrainerSection(Section):
    """The training backend: its type, arithmetic and memory."""

    type: str = "torch"
    precision: Precision = Precision.FP32
    device: Device = Device.AUTO
    gradient_checkpointing: bool = False
    micro_batch_tokens: int | str = "auto"
    """Most tokens of one backward pass. `auto`: as many as the device holds, up to 16,384, chosen when a run begins."""
    routing_replay: RoutingReplay = RoutingReplay.OFF
    """Of a mixture-of-experts model: `rollout` computes each token with the experts that computed it in the sampler
    (R3), docs/mixtures.md."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options that this type of trainer alone knows and checks: for torch `mesh` (docs/trainers.md), for jax `mesh` and
    what else `JaxOptions` lists."""
    memory_share: MemoryShare | None = None
    """Most of each GPU's memory that the trainer takes, as `engine.memory_share`."""

    @field_validator("micro_batch_tokens")
    @classmethod
    def _is_auto_or_enough(cls, tokens: int | str) -> int | str:
        if tokens != "auto" and (isinstance(tokens, str) or tokens < 2):
            raise ValueError(f'must be "auto" or a whole number of at least 2, got {tokens!r}')
        return tokens

    @property
    def token_budget(self) -> int:
        """`micro_batch_tokens` as a number; `auto` that nobody has settled is `MOST_TOKENS`."""
        return MOST_TOKENS if isinstance(self.micro_batch_tokens, str) else self.micro_batch_tokens


class StalenessSection(Section):
    """The bounds j and k (RLAX §3.1), by preset or by number."""

    preset: str | None = None
    j: int | None = None
    k: float | None = Field(default=None, allow_inf_nan=True)
    scope: StalenessScope = StalenessScope.GROUP
    """What is refused when a token is too old: its whole `group`, or its `rollout`; two that are left train."""

    overdue: Overdue = Overdue.DROP
    """What becomes of a group that is still being sampled when its last step comes: `drop`, or the step waits."""
    overdue_s: float = Field(default=60.0, gt=0)
    """Longest that each step waits for what is overdue."""

    @property
    def bounds(self) -> StalenessBounds:
        """The pair, a number given here taking precedence over the preset's."""
        base = PRESETS[self.preset or "pipeline"]
        return StalenessBounds(base.j if self.j is None else self.j, base.k if self.k is None else self.k)

    @model_validator(mode="after")
    def _resolvable(self) -> Self:
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"staleness.preset must be one of {', '.join(PRESETS)}, got {self.preset!r}")
        try:
            _ = self.bounds
        except RecipeError as error:
            raise ValueError(str(error)) from error
        return self


class CheckpointSection(Section):
    """When to checkpoint, how many to keep, and where copies go."""

    interval_steps: int = Field(default=100, ge=1)
    keep: int = Field(default=2, ge=1)
    """The newest, to go on from; the streams keep what they would read again."""
    keep_best: int = Field(default=0, ge=0)
    """Beside them, those with the highest accuracy in the evaluation of their version, however old."""
    location: str | None = None
    """Directory, or URL that fsspec knows, of copies: `run --resume <location>/<name>` goes on from them anywhere."""

    def url_of(self, name: str) -> str | None:
        """Where the copies of the run `name` lie."""
        return None if self.location is None else f"{self.location.rstrip('/')}/{name}"


class StreamsSection(Section):
    """Where the streams live; without `redis_url` the launcher starts an embedded server."""

    redis_url: SecretStr | None = None
    """It may hold a password: nothing that prints a recipe shows it."""
    max_groups: int = Field(default=4096, ge=1)
    """Most groups issued and not yet accounted for: the bound of every stream."""

    @field_validator("redis_url")
    @classmethod
    def _of_a_server(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None and not url.get_secret_value().startswith(
            ("redis://", "rediss://", "unix://")
        ):  # not shown: it may hold a secret
            raise ValueError("must begin with redis://, rediss:// or unix://; leave it out for an embedded server")
        return url


#: As many engines are told of a version by requests, unless the recipe says otherwise.
TOLD_ONE_BY_ONE = 64


class WeightsSection(Section):
    """How the trainer's weights reach the engines."""

    transport: Transport = Transport.BROADCAST
    """Pushed to all engines at once, or pulled by each from a parameter server."""
    backend: Backend = Backend.GLOO
    """What carries a broadcast: gloo by way of the hosts' memory, nccl from GPU to GPU, each of which is one rank's."""
    host: Annotated[str, Field(min_length=1)] | None = None
    """Address of the trainer's machine at which engines meet for a broadcast; by default the one that faces them."""
    dtype: WeightDType | None = None
    """In which they travel, whatever an engine keeps them in; by default the model directory's, or engine.dtype if that
    is float32."""
    rounding: Rounding = Rounding.DITHERED
    """How fp32 weights become bfloat16: `dithered` lets small updates through, `nearest` holds them back."""
    timeout_s: float = Field(default=120.0, gt=0, le=3600)
    """Longest that a publication may take. An engine that is not reached within it gets the next one."""
    announce: Announce = Announce.AUTO
    """How engines that pull are told of a version: one by one, or all by one entry of a stream that they follow."""

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if self.transport is Transport.PULL and (self.backend is not Backend.GLOO or self.host is not None):
            raise ValueError('weights.backend and weights.host are of a broadcast, weights.transport is "pull"')
        if self.transport is Transport.BROADCAST and self.announce is Announce.STREAM:
            raise ValueError('weights.announce = "stream" is for engines that pull; say weights.transport = "pull"')
        return self

    def announced_to(self, engines: int) -> bool:
        """Is a version announced by a stream in a run that begins with so many, rather than by requests to each?"""
        if self.transport is not Transport.PULL:
            return False
        return self.announce is Announce.STREAM or (self.announce is Announce.AUTO and engines > TOLD_ONE_BY_ONE)


class ParameterServerSection(Section):
    """Servers that hold versions of the weights in memory, for the transport `pull`."""

    shards: int = Field(default=1, ge=1, le=64)
    """Into how many parts of about equal size each version is cut; each has servers of its own."""
    replicas: int = Field(default=1, ge=1, le=64)
    """How many servers the launcher starts for each shard, which hold the same; engines are spread over them."""
    urls: tuple[BaseUrl, ...] = ()
    """Servers that run already, here or elsewhere, shard after shard; with any, the launcher starts none."""
    versions: int = Field(default=3, ge=2)
    """Most that a server holds: one that serves, one that comes, and one that may still be being saved."""
    copies: str | None = None
    """Directory, or URL that fsspec knows, of the persistent copies, by run and server; by default below the run's
    directory. What a run of this name before has left there is dropped."""

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        if len(set(self.urls)) != len(self.urls):
            raise ValueError("parameter_server.urls must name each server once")
        if len(self.urls) % self.shards:
            raise ValueError(
                f"parameter_server.urls must name as many servers for each of the {self.shards} shards, got "
                f"{len(self.urls)} in all"
            )
        return self


class LaunchSection(Section):
    """How the local launcher runs the roles."""

    threads: int = Field(default=1, ge=1)
    pin: Literal["auto", "none"] = "auto"
    engine_devices: tuple[DeviceIndices, ...] = ()
    """GPUs of each engine, such as [[0, 1], [2, 3]]; by default the first, apart from the trainer's."""
    trainer_devices: DeviceIndices = ()
    """GPUs of the trainer; by default the last."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    restarts: int = Field(default=3, ge=0)
    save_s: float = Field(default=30.0, gt=0)
    """How long a run, or a trainer, that is told to end may take to save its state first."""
    grace_s: float = Field(default=5.0, gt=0)


class EngineLimits(Section):
    """How many engines of one type there may be; knobs change both while the run is live."""

    min: int = Field(default=1, ge=0, le=4096)
    max: int = Field(ge=1, le=4096)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min must be at most max, got {self.min} and {self.max}")
        return self


class ElasticSection(Section):
    """When there are too few engines by a run's own figures, and when too many (docs/fleet.md); `ElasticRule` says what
    each number is."""

    mode: Elasticity = Elasticity.ON
    interval_s: float = Field(default=10.0, gt=0, le=3600)
    patience: int = Field(default=3, ge=1, le=1000)
    settle_s: float = Field(default=60.0, ge=0, le=86400)
    waiting: float = Field(default=0.15, gt=0, lt=1)
    content: float = Field(default=0.05, gt=0, lt=1)
    busy: float = Field(default=0.8, gt=0, le=1)
    stale: float = Field(default=0.1, ge=0, le=1)
    drain_s: float = Field(default=60.0, gt=0, le=86400)
    types: dict[str, EngineLimits] = Field(default_factory=dict)
    """Limits by type: more come of the first that has room, fewer go of the last. Without any, the run is as large as
    its recipe says."""

    @model_validator(mode="after")
    def _band(self) -> Self:
        if self.content >= self.waiting:
            raise ValueError(f"content must be below waiting, got {self.content:g} and {self.waiting:g}")
        return self
