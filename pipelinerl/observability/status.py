"""`RunStatus`: the current state of a run, as returned by the controller's `GET /status`.

It is sent as JSON. Unknown fields are ignored and missing ones take their default, so `pipelinerl status` can read runs
of other versions. `prometheus_text` formats metrics for `/metrics`. The launcher writes deaths of processes to
`restarts.json`, from which the controller reads them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import msgspec


class StatusPhase(StrEnum):
    """The phase of the whole run."""

    STARTING = "starting"
    TRAINING = "training"
    EVALUATING = "evaluating"
    FINISHING = "finishing"
    FINISHED = "finished"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        return self in (StatusPhase.FINISHED, StatusPhase.FAILED)


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One engine.

    `state` is its state in the fleet, `pinned` if it is reserved for an evaluation, or `left` if it was drained,
    replaced or removed on request.
    """

    url: str
    state: str
    name: str = ""
    type: str = ""
    version: int | None = None
    """Version of the weights that it serves; None if it has no weights of this run."""
    running: int = 0
    waiting: int = 0
    slots: int = 0
    tokens_per_s: float = 0.0
    speed: float = 1.0
    """Speed of its decode steps relative to the fleet's, if the two differ: 0.5 is half as fast."""
    last_error: str = ""

    @property
    def serves(self) -> bool:
        return self.state in ("healthy", "pinned")

    @property
    def note(self) -> str:
        """The last error, or that the engine is slow and how much; empty if all is well."""
        return self.last_error or (f"slow: {self.speed:.2f} of the fleet's speed" if self.speed < 1 else "")


class RequestedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that the launcher should start."""

    name: str
    type: str


class TrainerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's last report, and its age in seconds. While a trainer waits for groups, it repeats its report."""

    last_report: str
    silent_s: float


class ActorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One actor: its groups in flight, and the seconds since its last report."""

    name: str
    groups_in_flight: int = 0
    silent_s: float = 0.0


class ParameterServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter server: the shard of the weights that it holds, and its number among this shard's replicas."""

    url: str
    shard: int
    replica: int
    state: str
    """`starting` until its first answer, then `up` or `down`."""
    last_error: str = ""


class RestartStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A launched process that has died. Deaths are forgiven over time.

    With more than `limit` unforgiven deaths, the process is not restarted, and the run fails if it needs the process.
    """

    name: str
    deaths: int
    unforgiven: float
    limit: int


class PassAtStatus(msgspec.Struct, frozen=True, kw_only=True):
    """pass@k or maj@k of the last evaluation, with its 95 % interval."""

    k: int
    value: float
    low: float
    high: float


class EvaluationFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of an evaluation; an accuracy is None if no answer was judged."""

    accuracy: float | None = None
    """Mean accuracy, with a 95 % interval from `low` to `high`."""
    low: float | None = None
    high: float | None = None
    pass_at: tuple[PassAtStatus, ...] = ()
    """Probability that at least one of k answers is right, for each k in the recipe."""
    majority_at: tuple[PassAtStatus, ...] = ()
    """Probability that the majority answer of k samples is right, for each k above 2 in the recipe."""
    length_mean: float | None = None
    length_p95: float | None = None
    """The 95th percentile of tokens per sample."""
    truncated: float | None = None
    """Share of the samples that hit the token limit."""


class GroupFiguresStatus(EvaluationFigures, frozen=True, kw_only=True):
    """Results of the last evaluation for one domain or tag."""

    name: str
    problems: int


class EvaluatingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The evaluation in progress: its model version, the engine reserved for it (if any), and its progress.

    `pin` is the way to get all answers from one version: `engine` reserves an engine, `gate` postpones updates, `none`
    allows several versions. `discarded` counts answers that had tokens of another version.
    """

    model_version: int
    pin: str
    engine: str = ""
    answered: int = 0
    problems: int = 0
    discarded: int = 0
    restarts: int = 0
    sets: tuple[str, ...] = ()


class LedgerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of orders (requests to sample one group): `issued` in all; the others add up to it after every step."""

    issued: int = 0
    trained: int = 0
    filtered: int = 0
    stale: int = 0
    failed: int = 0
    in_flight: int = 0


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The engines of a run."""

    engines: tuple[EngineStatus, ...] = ()
    """All engines that ever joined, by URL."""
    requested: tuple[RequestedEngine, ...] = ()
    """Engines that should run in addition to the recipe's."""
    to_stop: tuple[str, ...] = ()
    """Names of engines whose processes should end."""
    tokens_per_s: float = 0.0
    """Tokens sampled per second, over all engines."""
    occupancy: float = 0.0
    """Busy share of the healthy engines' slots (places for concurrent sequences), 0..1."""
    update_pause_s: float = 0.0
    """The longest pause of an engine during the last weight update."""
    has_launcher: bool = True
    """True if a launcher follows this status to start requested engines and stop those in `to_stop`."""


class HeldOutStatus(EvaluationFigures, frozen=True, kw_only=True):
    """Results of the last evaluation of one set."""

    name: str = ""
    """Name of the evaluation set; empty before the first evaluation."""
    version: int | None = None
    """Version of the evaluated weights."""
    one_version: bool = False
    """True if every token was generated by `version`."""
    incomplete: str = ""
    """The reason why some problems have no answer; empty if all have one."""
    by_domain: tuple[GroupFiguresStatus, ...] = ()
    by_tag: tuple[GroupFiguresStatus, ...] = ()
    first: float | None = None
    """Accuracy before training began."""
    best: float | None = None


class LastStepStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of the last step, over its rollouts; None or 0 before the first step."""

    reward: float | None = None
    """Mean over the answers that have a verdict."""
    unjudged: float | None = None
    """Share of the answers without a verdict among those that arrived since the previous step."""
    rollouts_per_s: float = 0.0
    """Rollouts trained on per second, including the wait for them."""
    staleness_mean: float = 0.0
    """Mean staleness of the rollouts, in versions; 1 is on policy."""
    staleness_max: int = 0
    """Maximum staleness of the rollouts, in versions."""
    entropy: float | None = None
    """Entropy estimated from the sampled tokens, in nats per token."""
    exact_entropy: float | None = None
    """Entropy of the sampling distributions, if the run measures it."""
    length_mean: float | None = None
    truncated: float | None = None
    """Share of the answers that hit the token limit."""
    discarded: float = 0.0
    """Share of the sampled tokens of the last 25 steps that were dropped as stale."""
    length_ratio: float = 1.0
    """Mean length of the trained answers of the last 25 steps ÷ that of all answers that arrived."""
    optimizer_steps: int | None = None
    """Number of optimizer steps, if the step may have several."""
    kl_old: float | None = None
    """Mean KL from π_old over the optimizer steps in nats per token, if known."""
    clip_fraction: float | None = None
    """Share of the trained tokens that clipping left without gradient."""
    by_domain: dict[str, dict[str, float]] = {}
    """Figures by domain of all groups that arrived since the previous step; docs/use/watching.md lists them."""
    by_tag: dict[str, dict[str, float]] = {}


def unjudged_share(by_domain: Mapping[str, Mapping[str, float]]) -> float | None:
    """Return the share of answers without a verdict over all domains; None if no answer arrived."""
    rollouts = sum(each.get("rollouts", 0.0) for each in by_domain.values())
    unjudged = sum(each.get("unjudged", 0.0) * each.get("rollouts", 0.0) for each in by_domain.values())
    return unjudged / rollouts if rollouts else None


def reward_words(reward: float | None, unjudged: float | None) -> str:
    """Return a reward as text, with the share of answers that it leaves out: `0.750 (12.5% unjudged)`."""
    shown = "–" if reward is None else f"{reward:.3f}"
    return f"{shown} ({unjudged:.1%} unjudged)" if unjudged else shown


def staleness_words(mean: float, most: float) -> str:
    """Return a step's staleness as text: `1.3, max 2 (1 = on policy)`; a dash before the first step.

    Staleness counts the version that the step makes, as k does (`StalenessBounds`).
    """
    return f"{mean:.1f}, max {most:.0f} (1 = on policy)" if most else "–"


class IncidentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Something that went wrong, with all its repetitions; `seconds` is its duration, if it is of a kind that lasts."""

    kind: str
    what: str = ""
    count: int = 1
    seconds: float = 0.0
    ongoing: bool = False


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run at one moment."""

    run: str
    phase: StatusPhase = StatusPhase.STARTING
    step: int = 0
    total_steps: int = 0
    model_version: int = 0
    """Version of the trainer's weights."""
    epoch: int = 0
    """Number of trainers that have started so far."""
    last_step: LastStepStatus = LastStepStatus()
    held_out: HeldOutStatus = HeldOutStatus()
    """Results of the recipe's first evaluation set, which selects the best checkpoints."""
    other_sets: tuple[HeldOutStatus, ...] = ()
    """Results of the other evaluation sets, once they have been evaluated."""
    evaluating: EvaluatingStatus | None = None
    fleet: FleetStatus = FleetStatus()
    actors: tuple[ActorStatus, ...] = ()
    parameter_servers: tuple[ParameterServerStatus, ...] = ()
    """The parameter servers of a run whose engines pull weights, by shard and replica."""
    ledger: LedgerStatus = LedgerStatus()
    knobs: dict[str, Any] = {}
    trainer: TrainerStatus | None = None
    alarms: tuple[str, ...] = ()
    """Active alarms, one sentence each."""
    incidents: tuple[IncidentStatus, ...] = ()
    """The incidents so far, the most harmful first."""
    lag: str = ""
    """The lag that the run holds, what it gains and costs, in a sentence; empty before the first steps."""
    waiting_for: str = ""
    """The condition that blocks the run now; empty if nothing does."""
    restarts: tuple[RestartStatus, ...] = ()
    """Processes that have died, if the launcher is on the controller's machine."""
    still_s: float = 0.0
    """Seconds since anything in the run made progress."""
    elapsed_s: float = 0.0
    """Seconds since the run began, without periods in which it was not running."""
    eta_s: float | None = None
    """Estimated seconds until the last step; None before the first step."""

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> RunStatus:
        """Decode the output of `to_json`. Raises ValueError, which names the wrong field, for other data."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"expected a run's status as JSON: {error}") from None


def format_duration(seconds: float) -> str:
    """Format seconds in at most two units: `4.2 s`, `3 min 05 s`, `2 h 10 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_milliseconds(seconds: float) -> str:
    """Format a short time as milliseconds below a second: `12.5 ms`, `1.25 s`."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


#: The media type of Prometheus' text format.
PROMETHEUS_TYPE: Final = "text/plain; version=0.0.4"

#: `Labels` are (name, value) pairs; `Samples` maps each set of labels of one metric to its value.
Labels = tuple[tuple[str, str], ...]
Samples = Mapping[Labels, float]


_ESCAPED: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def prometheus_text(values: Mapping[str, float], *, prefix: str) -> str:
    """Return metrics without labels in Prometheus' text exposition format, version 0.0.4."""
    return labelled_text({name: {(): value} for name, value in values.items()}, prefix=prefix)


def labelled_text(metrics: Mapping[str, Samples], *, prefix: str) -> str:
    """Return labelled samples in Prometheus' text format, as counters if named `…_total`, otherwise as gauges."""
    lines = []
    for name, samples in metrics.items():
        full = f"{prefix}_{name}"
        if samples:
            lines.append(f"# TYPE {full} {'counter' if name.endswith('_total') else 'gauge'}")
        for labels, value in samples.items():
            pairs = ",".join(f'{label}="{text.translate(_ESCAPED)}"' for label, text in labels)
            lines.append(f"{full}{f'{{{pairs}}}' if labels else ''} {value:.17g}")
    return "\n".join(lines) + "\n"


FORGIVEN_EVERY_S: Final = 100.0
_FILE: Final = "restarts.json"


class _Written(msgspec.Struct, frozen=True):
    at: float
    processes: tuple[RestartStatus, ...]


def write_restarts(run_dir: Path, processes: tuple[RestartStatus, ...]) -> None:
    """Write the processes that have died to the run's `restarts.json`, atomically. Raises OSError."""
    draft = run_dir / f"{_FILE}.new"
    draft.write_bytes(msgspec.json.encode(_Written(time.time(), processes)))
    draft.replace(run_dir / _FILE)


def read_restarts(run_dir: Path) -> tuple[RestartStatus, ...]:
    """Read the processes that have died, with deaths forgiven up to now; empty if the file is missing or unreadable."""
    try:
        written = msgspec.json.decode((run_dir / _FILE).read_bytes(), type=_Written)
    except (OSError, msgspec.MsgspecError):
        return ()
    forgiven = max(0.0, time.time() - written.at) / FORGIVEN_EVERY_S
    return tuple(
        msgspec.structs.replace(one, unforgiven=max(0.0, one.unforgiven - forgiven)) for one in written.processes
    )


def restarts_line(processes: tuple[RestartStatus, ...]) -> str:
    """Format deaths as `deaths: trainer 5 (1.2 of 3 unforgiven)`; empty if there are none."""
    listed = (f"{one.name} {one.deaths} ({one.unforgiven:.1f} of {one.limit} unforgiven)" for one in processes)
    return f"deaths: {', '.join(listed)}" if processes else ""
