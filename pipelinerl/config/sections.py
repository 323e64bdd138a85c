"""Recipe sections for sampling, training, running and observing; `recipe.py` combines all sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SecretStr, create_model, field_validator, model_validator

from inference_contract.weights import Backend, BaseUrl, OnUpdate, Transport
from pipelinerl import registry
from pipelinerl.enums import (
    COLDEST,
    HOTTEST,
    Announce,
    Elasticity,
    OnCollapse,
    Overdue,
    Receiver,
    RoutingReplay,
    StalenessScope,
    VerifierLocation,
    WeightFormat,
)
from pipelinerl.errors import RecipeError, did_you_mean
from pipelinerl.section import Section
from pipelinerl.staleness import AUTO, MODES, StalenessBounds
from pipelinerl.system.files import from_home
from pipelinerl.types import Sampling
from trainer_contract.types import Device, HeadPrecision, Kernels, OptimizerSpec, Precision, Rounding, WeightDType

MODELS = Path(__file__).resolve().parents[1] / "models"


class RunSection(Section):
    """The run's name, its directory, and the conditions for its end."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "run"
    """Name of the run, and of its directory."""
    directory: Path = Path("runs")
    """Parent of the run's directory."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of all random choices."""
    steps: int = Field(default=100, ge=1)
    """Steps to train."""
    until_accuracy: float | None = Field(default=None, gt=0, le=1)
    """End early once an evaluation reaches this held-out accuracy."""
    stall_s: float = Field(default=120.0, gt=0)
    """Time without progress after which an event and the controller's log name the blocker."""
    no_signal_steps: int = Field(default=20, ge=1)
    """The run ends, as solved or hopeless, after it dropped this many steps' worth of groups without signal in a row.

    An alarm is raised at half of this number.
    """
    on_collapse: OnCollapse = OnCollapse.ALARM
    """If the run loses what it had learned: `alarm`, or `rewind` to a good checkpoint with half the learning rate."""
    engine_timeout_s: float = Field(default=900.0, gt=0)
    """Time without a live engine after which the run saves its state and ends."""


class ModelSection(Section):
    """The model to train."""

    path: str
    """A directory in Hugging Face format, or `shipped:<name>`."""
    head_precision: HeadPrecision = HeadPrecision.MODEL
    """Precision of the output layer, in engine and trainer: like the other layers, or `fp32` (MiniMax-M1)."""
    kernels: Kernels = Kernels.FAST
    """Kernels of engine and trainer: the fastest, or `batch_invariant`, for log-probs that are equal to the bit."""

    @property
    def resolved(self) -> Path:
        """The directory that `path` refers to: a shipped model or a directory."""
        name = self.path.removeprefix("shipped:")
        return MODELS / name if name != self.path else from_home(self.path)


#: Type of a share of memory, above 0 and at most 1.
MemoryShare = Annotated[float, Field(gt=0, le=1)]

#: Indices into the list of GPUs that the run may use.
DeviceIndices = tuple[Annotated[int, Field(ge=0)], ...]


class EngineSection(Section):
    """The inference servers: type, number and capacity."""

    type: str = "torch"
    """Name of a registered engine type, such as `torch`, `vllm` or `sglang_server`, or a user's as path.py:name."""
    count: int = Field(default=1, ge=1)
    """Engines that the launcher starts."""
    slots: int = Field(default=128, ge=1)
    """Sequences that one engine decodes at a time."""
    max_waiting: int = Field(default=4096, ge=1)
    """Sequences that one engine queues; further requests are rejected."""
    context_length: int = Field(default=512, ge=2)
    """The most tokens of prompt and answer together."""
    dtype: Literal["auto"] | WeightDType = "auto"
    """Type of weights, cache and arithmetic; `auto` is float32 on a CPU, and otherwise the model directory's."""
    weights: WeightFormat = WeightFormat.NATIVE
    """Format of linear layers: native, or quantised (`int8`)."""
    device: Device = Device.AUTO
    """Device of the engine; `auto` takes a GPU if there is one."""
    devices: int = Field(default=1, ge=1)
    """Devices that share one engine's model (types jax and vllm)."""
    servers: tuple[BaseUrl, ...] = ()
    """Base URLs of the servers behind engines of the types vllm_server and sglang_server, one per engine."""
    memory_share: MemoryShare | None = None
    """The largest share of each GPU's memory for one engine; by default as `launch/placement.py` divides it, or all."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of this engine type, checked by the engine: for vllm, fields of its `AsyncEngineArgs`."""
    on_update: OnUpdate = OnUpdate.CONTINUE
    """Treatment of sequences in flight when new weights arrive."""
    receiver: Receiver = Receiver.IN_PROCESS
    """Process that receives broadcast weights: the engine's, or a separate one (`own_process`) that may crash alone."""


class ActorSection(Section):
    """The processes that sample rollouts from the engines and have them verified.

    An engine streams its samples to the actor every `stream_interval_s`. If the engine dies, another engine continues
    the samples. With 0, an answer arrives only when complete, and an engine that dies loses its samples.
    """

    count: int = Field(default=1, ge=1)
    """Actors that the launcher starts."""
    groups_in_flight: int | None = Field(default=None, ge=1)
    """Groups in flight per actor; by default four times what fills the engines' slots."""
    attempts: int = Field(default=4, ge=1)
    """Attempts per group if weight updates abort its samples."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Time limit for an engine's answer."""
    stream_interval_s: float = Field(default=1.0, ge=0, le=3600)
    """Seconds between an engine's partial answers; 0 for none."""


class SamplingSection(Section):
    """The sampling of training rollouts."""

    group_size: int = Field(default=16, ge=1)
    """Answers per training problem."""
    temperature: float = Field(default=1.0, ge=COLDEST, le=HOTTEST)
    """Sampling temperature; a knob while the run is live."""
    top_p: float = Field(default=1.0, ge=1e-6, le=1)
    """Nucleus sampling; 1 keeps the whole distribution. Engines report log-probs from before it (not vLLM)."""
    top_k: int = Field(default=0, ge=0, lt=2**31)
    """Sample from the k most probable tokens; 0 for all. Engines report log-probs from before it (not vLLM)."""
    max_tokens: int = Field(default=256, ge=1)
    """The most tokens of one answer."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end an answer."""

    @property
    def of_an_order(self) -> Sampling:
        """The sampling parameters of a training order, the controller's request for one group of rollouts."""
        return Sampling(num_samples=self.group_size, **self.model_dump(exclude={"group_size"}))


#: Type of a number of at least 0 and below 1.
Fraction = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSection(Section):
    """AdamW and the learning-rate schedule."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate; a knob while the run is live."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises to its peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up."""
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """The share of the peak rate that remains at the last step; ignored by a constant schedule."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's β₁ and β₂."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's ε."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    grad_clip: float = Field(default=1.0, ge=0)
    """The largest norm of the gradient; 0 disables clipping."""

    @property
    def spec(self) -> OptimizerSpec:
        """The settings that the trainer needs; the schedule belongs to the training loop."""
        return OptimizerSpec(betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, grad_clip=self.grad_clip)


#: The upper limit of `trainer.micro_batch_tokens = "auto"`.
MOST_TOKENS = 16384


class TrainerSection(Section):
    """The training backend: its type, precision and memory."""

    type: str = "torch"
    """Name of a registered trainer type, such as `torch` or `jax`, or a user's as path.py:name."""
    precision: Literal["auto"] | Precision = "auto"
    """Precision of forward and backward passes; `auto`: bf16 for a bfloat16 model on an accelerator, otherwise fp32.

    Master weights and optimizer state are fp32.
    """
    device: Device = Device.AUTO
    """Device of the trainer; `auto` takes a GPU if there is one."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, to save memory."""
    micro_batch_tokens: int | str = "auto"
    """The most tokens of one backward pass; `auto` takes as many as the device can hold, up to 16,384."""
    routing_replay: RoutingReplay = RoutingReplay.OFF
    """Routing of a mixture-of-experts model: `rollout` uses the sampler's experts (R3); docs/understand/mixtures.md."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of this trainer type, checked by the trainer.

    For torch `mesh` (docs/understand/trainers.md); for jax `mesh` and the other fields of `JaxOptions`.
    """
    memory_share: MemoryShare | None = None
    """The largest share of each GPU's memory for the trainer, like `engine.memory_share`."""

    @field_validator("micro_batch_tokens")
    @classmethod
    def _is_auto_or_enough(cls, tokens: int | str) -> int | str:
        if tokens != "auto" and (isinstance(tokens, str) or tokens < 2):
            raise ValueError(f'must be "auto" or a whole number of at least 2, got {tokens!r}')
        return tokens

    @property
    def passes_in(self) -> Precision:
        """The precision of forward and backward passes; fp32 as long as `precision` is `auto` and not yet resolved."""
        return Precision.FP32 if self.precision == "auto" else self.precision

    @property
    def token_budget(self) -> int:
        """`micro_batch_tokens` as a number; `MOST_TOKENS` while `auto` has not been resolved."""
        return MOST_TOKENS if isinstance(self.micro_batch_tokens, str) else self.micro_batch_tokens


class StalenessSection(Section):
    """Staleness bounds in versions (RLAX §3.1): j for engines' weights, k for trained tokens; by mode or number."""

    mode: str | None = None
    """Name of a pair (j, k), or `auto`, the default: the run chooses j and the lag that it holds, at most k = 64."""
    j: int | Literal["auto"] | None = None
    """Engines receive new weights when they are j versions behind the trainer; a knob while the run is live."""
    k: float | None = Field(default=None, allow_inf_nan=True)
    """The largest age of a trained token in versions, `inf` for no limit; a knob while the run is live."""
    scope: StalenessScope = StalenessScope.GROUP
    """The unit to drop if a token is too old: its `group`, or only its `rollout` if two others of the group remain."""

    overdue: Overdue = Overdue.DROP
    """Treatment of a group that is still being sampled at its last admissible step: `drop`, or `wait` for it."""
    overdue_s: float = Field(default=60.0, gt=0)
    """The longest time that each step waits for overdue groups."""

    @property
    def bounds(self) -> StalenessBounds:
        """The bounds (j, k), with j = 1 if the run chooses it; a j or k given here overrides that of the mode."""
        base = MODES[self.mode or AUTO]
        j = self.j if isinstance(self.j, int) else base.j
        return StalenessBounds(j, base.k if self.k is None else self.k)

    @property
    def auto_j(self) -> bool:
        """True if the run chooses j, and whether it keeps any lag at all."""
        return self.j == AUTO or (self.j is None and self.mode in (None, AUTO))

    @model_validator(mode="before")
    @classmethod
    def _has_no_preset(cls, table: Any) -> Any:
        if isinstance(table, Mapping) and "preset" in table:
            raise ValueError("staleness.preset is called staleness.mode; rename it")
        return table

    @model_validator(mode="after")
    def _resolvable(self) -> Self:
        if self.mode is not None and self.mode not in MODES:
            hint = "; pipeline is called auto" if self.mode == "pipeline" else did_you_mean(self.mode, MODES)
            raise ValueError(f"staleness.mode must be one of {', '.join(MODES)}, got {self.mode!r}{hint}")
        try:
            _ = self.bounds
        except RecipeError as error:
            raise ValueError(str(error)) from error
        return self


class CheckpointSection(Section):
    """The interval of checkpoints, the number that is kept, and the location of copies."""

    interval_steps: int = Field(default=100, ge=1)
    """Steps between checkpoints."""
    keep: int = Field(default=2, ge=1)
    """The number of newest checkpoints that are kept. Streams keep the rollouts needed to resume from them."""
    keep_best: int = Field(default=0, ge=0)
    """The number of checkpoints with the highest evaluation accuracy that are kept in addition, regardless of age."""
    location: str | None = None
    """Directory or fsspec URL for copies of checkpoints; any machine can `run --resume <location>/<name>`."""

    def url_of(self, name: str) -> str | None:
        """Return the location of the checkpoint copies of the run `name`; None if no copies are made."""
        return None if self.location is None else f"{self.location.rstrip('/')}/{name}"


class StreamsSection(Section):
    """The Redis streams between the processes; without `redis_url` the launcher starts an embedded server."""

    redis_url: SecretStr | None = None
    """URL of a Redis server. It may contain a password, so it is never printed."""
    max_groups: int = Field(default=4096, ge=1)
    """The most groups requested and not yet trained, dropped or failed; this bounds the size of every stream."""

    @field_validator("redis_url")
    @classmethod
    def _of_a_server(cls, url: SecretStr | None) -> SecretStr | None:
        # The message omits the URL, which may contain a password.
        if url is not None and not url.get_secret_value().startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("must begin with redis://, rediss:// or unix://; leave it out for an embedded server")
        return url


#: With `announce = "auto"`, versions are announced by a request to each engine if there are at most this many engines,
#: else by a stream.
TOLD_ONE_BY_ONE = 64


class WeightsSection(Section):
    """The transport of the trainer's weights to the engines."""

    transport: Transport = Transport.BROADCAST
    """`broadcast` to all engines at once, or `pull` by each engine from a parameter server."""
    backend: Backend = Backend.GLOO
    """Transport of a broadcast: gloo through host memory, or nccl between GPUs, with one rank per GPU."""
    host: Annotated[str, Field(min_length=1)] | None = None
    """Address of the trainer's host for broadcasts; by default that of the interface that faces the engines."""
    dtype: WeightDType | None = None
    """Type in which weights are sent; by default the model directory's, or `engine.dtype` if that is float32."""
    rounding: Rounding = Rounding.DITHERED
    """Rounding of fp32 weights to bfloat16.

    `dithered` preserves small updates on average, `nearest` suppresses them.
    """
    timeout_s: float = Field(default=120.0, gt=0, le=3600)
    """Time limit of a publication. An engine that is not reached in time gets the next version."""
    announce: Announce = Announce.AUTO
    """Announcement of versions to pulling engines: a request to each, or a stream; `auto` streams above 64 engines."""

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if self.transport is Transport.PULL and (self.backend is not Backend.GLOO or self.host is not None):
            raise ValueError('weights.backend and weights.host apply to a broadcast, but weights.transport is "pull"')
        if self.transport is Transport.BROADCAST and self.announce is Announce.STREAM:
            raise ValueError('weights.announce = "stream" is for engines that pull; set weights.transport = "pull"')
        return self

    def announced_to(self, engines: int) -> bool:
        """Return True if engines learn of new versions from a stream; `engines` is their number at the run's start."""
        if self.transport is not Transport.PULL:
            return False
        return self.announce is Announce.STREAM or (self.announce is Announce.AUTO and engines > TOLD_ONE_BY_ONE)


class ParameterServerSection(Section):
    """Servers that hold versions of the weights in memory, for the transport `pull`."""

    shards: int = Field(default=1, ge=1, le=64)
    """The number of equal parts into which each version of the weights is split; each part has its own servers."""
    replicas: int = Field(default=1, ge=1, le=64)
    """Servers that the launcher starts per shard, all with the same content; engines are spread over them."""
    urls: tuple[BaseUrl, ...] = ()
    """Base URLs of running servers, ordered by shard; if given, the launcher starts none."""
    versions: int = Field(default=3, ge=2)
    """The most versions that a server holds, such as one being served, one being received and one being saved."""
    copies: str | None = None
    """Directory or fsspec URL of the persistent copies, by run and server; by default in the run's directory.

    Copies of an earlier run with this name are deleted.
    """

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        if len(set(self.urls)) != len(self.urls):
            raise ValueError("parameter_server.urls must name each server once")
        if len(self.urls) % self.shards:
            raise ValueError(
                f"parameter_server.urls must name equally many servers for each of the {self.shards} shards, got "
                f"{len(self.urls)} in all"
            )
        return self


class VerificationSection(Section):
    """The processes that judge answers, and limits of verifier services; docs/use/verification.md."""

    services: int = Field(default=0, ge=0, le=256)
    """Verifier services that the launcher starts; with 0, each actor judges its own samples."""
    judged_in: VerifierLocation | None = None
    """The processes that judge answers, by default as `services` implies; needed only if services run elsewhere."""
    cache_mb: int = Field(default=64, ge=0, le=65_536)
    """Verdict cache of each service."""
    grace_s: float = Field(default=60.0, gt=0, le=3600)
    """The longest time for retrying an answer at other services after its service failed; then it is masked."""
    silence_s: float = Field(default=30.0, ge=5, le=3600)
    """Silence after which a service counts as failed."""
    timeout_s: float = Field(default=900.0, gt=0, le=86_400)
    """Time limit of a service for the answers to one problem, including its queue."""

    @property
    def uses_services(self) -> bool:
        """True if verifier services judge the answers, instead of the actors."""
        return bool(self.services) if self.judged_in is None else self.judged_in is VerifierLocation.SERVICES

    @model_validator(mode="after")
    def _are_used(self) -> Self:
        if self.services and not self.uses_services:
            raise ValueError(f'services ({self.services}) must be 0 where judged_in = "actors": they would be unused')
        return self


class LaunchSection(Section):
    """Process settings of the local launcher."""

    threads: int = Field(default=1, ge=1)
    """Compute threads of each process."""
    pin: Literal["auto", "none"] = "auto"
    """On small CPU machines, `auto` gives engines and trainer cores of their own; `none` leaves it to the scheduler."""
    engine_devices: tuple[DeviceIndices, ...] = ()
    """GPUs of each engine, such as [[0, 1], [2, 3]]; by default the first, apart from the trainer's."""
    trainer_devices: DeviceIndices = ()
    """GPUs of the trainer; by default the last."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """Time limit for a process to become healthy."""
    restarts: int = Field(default=3, ge=0)
    """How often a process that dies is restarted before the run ends; uptime earns further restarts."""
    save_s: float = Field(default=30.0, gt=0)
    """Time for a run, or a trainer, to save its state when it is stopped."""
    grace_s: float = Field(default=5.0, gt=0)
    """Time for a process to end before it is killed."""


class EngineLimits(Section):
    """Limits on the number of engines of one type; both limits are knobs while the run is live."""

    min: int = Field(default=1, ge=0, le=4096)
    """The smallest number of engines of this type."""
    max: int = Field(ge=1, le=4096)
    """The largest number of engines of this type."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min must be at most max, got {self.min} and {self.max}")
        return self


class ElasticSection(Section):
    """Automatic scaling of the number of engines by the run's own metrics (docs/use/fleet.md)."""

    mode: Elasticity = Elasticity.ON
    """`on` scales the number of engines; `dry_run` only records what it would do."""
    interval_s: float = Field(default=10.0, gt=0, le=3600)
    """Length of one measurement interval."""
    patience: int = Field(default=3, ge=1, le=1000)
    """Consecutive intervals that must agree before a change."""
    settle_s: float = Field(default=60.0, ge=0, le=86400)
    """Least time between changes."""
    waiting: float = Field(default=0.15, gt=0, lt=1)
    """The share of the trainer's time spent waiting, above which busy engines are too few."""
    content: float = Field(default=0.05, gt=0, lt=1)
    """The share of the trainer's time spent waiting, below which engines may be too many."""
    busy: float = Field(default=0.8, gt=0, le=1)
    """The share of occupied slots at which engines count as busy."""
    stale: float = Field(default=0.1, ge=0, le=1)
    """The share of stale groups above which busy engines are too few."""
    drain_s: float = Field(default=60.0, gt=0, le=86400)
    """Time limit for the remaining work of an engine that is removed."""
    types: dict[str, EngineLimits] = Field(default_factory=dict)
    """Limits by engine type; without any, the number of engines is fixed.

    Engines are added to the first type below its maximum, and removed from the last type above its minimum.
    """

    @model_validator(mode="after")
    def _band(self) -> Self:
        if self.content >= self.waiting:
            raise ValueError(f"content must be below waiting, got {self.content:g} and {self.waiting:g}")
        return self


class SamplesSection(Section):
    """Samples kept in the run's directory for users; `pipelinerl samples` shows them."""

    log: Literal["on", "off"] = "on"
    """`off` keeps no samples."""
    groups_per_step: int = Field(default=2, ge=1, le=1024)
    """Groups of each step that are kept, drawn by seed; one filtered group is kept in addition."""
    max_bytes: int = Field(default=32 * 2**20, ge=2**20)
    """Size limit of all sample files of the run: half for training, half for evaluations."""


class FiguresSection(Section):
    """Metrics of a step that cost extra time."""

    exact_entropy_interval: int | None = Field(default=None, ge=0)
    """Steps between measurements of the entropy over the whole vocabulary, on one rollout in 16; 0 for never.

    By default 10, and never with a trainer that would have to compile extra programs (JAX).
    """

    def interval(self, trainer: str) -> int:
        """Return the number of steps between exact entropy measurements with this type of trainer; 0 for never."""
        if self.exact_entropy_interval is not None:
            return self.exact_entropy_interval
        component = registry.TRAINERS.get(trainer)
        return 10 if component is None or component.measures_entropy else 0


class TrackersSection(Section):
    """Experiment trackers, fed from the run's events by a separate process, so they cannot slow or end the run."""

    @property
    def chosen(self) -> tuple[str, ...]:
        return tuple(name for name, section in self if section)


def _tracker_fields() -> Iterator[tuple[str, Any]]:
    for name, tracker in registry.TRACKERS.loadable():
        if tracker.section is not None:
            yield name, (tracker.section | None, None)
        else:
            yield name, (bool, Field(default=False, description=tracker.switch))


# Type checkers see the class above, which has no fields: `chosen` names them.
TrackersSection = create_model(  # type: ignore[misc]
    "TrackersSection", __base__=TrackersSection, __module__=__name__, **dict(_tracker_fields())
)
