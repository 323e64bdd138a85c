"""`RunStatus`: what a run is doing now, as the controller's `GET /status` answers it.

It crosses processes as JSON. Fields that a reader does not know are ignored and absent ones take their default, so that
`pipelinerl status` of one version can read a run of another.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec


class StatusPhase(StrEnum):
    """What the run as a whole is at."""

    STARTING = "starting"
    TRAINING = "training"
    EVALUATING = "evaluating"
    FINISHING = "finishing"
    FINISHED = "finished"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """Will nothing more happen?"""
        return self in (StatusPhase.FINISHED, StatusPhase.FAILED)


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: `state` is its lifecycle in the fleet, `healthy` when it is given work, `pinned` when that is an
    evaluation's alone."""

    url: str
    state: str
    name: str = ""
    type: str = ""
    version: int = 0
    running: int = 0
    waiting: int = 0
    slots: int = 0
    tokens_per_s: float = 0.0
    last_error: str = ""
    left_as_planned: bool = False
    """It is out because somebody drained, replaced or removed it."""

    @property
    def serves(self) -> bool:
        """Is it given work, of whatever kind?"""
        return self.state in ("healthy", "pinned")


class RequestedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that the launcher is to start."""

    name: str
    type: str


class TrainerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer: what it said last, and how long it has been silent; one that waits for groups says so again."""

    last_report: str
    silent_s: float


class ActorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One actor: groups it is working on, and how long it has been silent."""

    name: str
    groups_in_flight: int = 0
    silent_s: float = 0.0


class RestartStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A process of the launcher's that has died: how often in all, and of those how many are not forgiven yet. One more
    than `limit` of these ends the run."""

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


class GroupFiguresStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the last evaluation found of one domain, or of the problems with one tag."""

    name: str
    problems: int
    accuracy: float | None = None
    low: float | None = None
    high: float | None = None
    pass_at: tuple[PassAtStatus, ...] = ()
    majority_at: tuple[PassAtStatus, ...] = ()
    length_mean: float | None = None
    """Tokens of a sample."""
    length_p95: float | None = None
    truncated: float | None = None
    """Share of the samples that ended for want of tokens."""


class EvaluatingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The evaluation under way: of which version, on which engine alone, and how far it is.

    `pin` is how one version is seen to (`engine`, `gate`, `none`), `discarded` counts answers of other versions. `sets`
    are the names of the evaluation sets that it asks.
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
    """The account of prompt orders: `issued` is the sum of the others at every step."""

    issued: int = 0
    trained: int = 0
    filtered: int = 0
    stale: int = 0
    failed: int = 0
    in_flight: int = 0


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The engines of a run."""

    engines: tuple[EngineStatus, ...] = ()
    """All that ever came, by URL."""
    requested: tuple[RequestedEngine, ...] = ()
    """Engines beyond the recipe's that are to run."""
    to_stop: tuple[str, ...] = ()
    """Names of those, of any, whose processes are to end."""
    tokens_per_s: float = 0.0
    """Tokens sampled per second, over all engines."""
    occupancy: float = 0.0
    """Share of the healthy engines' slots that work, 0..1."""
    update_pause_s: float = 0.0
    """The longest time that an engine stood still for the last weight update."""
    has_launcher: bool = True
    """Whether a launcher follows this status: it starts who is requested and ends who is to stop."""


class HeldOutStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What evaluations have shown so far; an accuracy is None where nothing was judged."""

    name: str = ""
    """Which evaluation set it is of; empty before the first evaluation."""
    accuracy: float | None = None
    """Mean of the last evaluation."""
    low: float | None = None
    """Lower end of its 95 % interval."""
    high: float | None = None
    """Upper end of its 95 % interval."""
    version: int | None = None
    """Which weights it is of."""
    one_version: bool = False
    """Is every token of its answers of those weights?"""
    incomplete: str = ""
    """Why not every problem has its answer; empty when all have."""
    pass_at: tuple[PassAtStatus, ...] = ()
    """Chances that one of k answers is right, for each k that the recipe asks for."""
    majority_at: tuple[PassAtStatus, ...] = ()
    """Chances that the answer which most of k samples give is right, for each k above two of those."""
    length_mean: float | None = None
    """Tokens of a sample."""
    length_p95: float | None = None
    """The length that one sample in twenty exceeds."""
    truncated: float | None = None
    """Share of the samples that ended for want of tokens."""
    by_domain: tuple[GroupFiguresStatus, ...] = ()
    by_tag: tuple[GroupFiguresStatus, ...] = ()
    first: float | None = None
    """Accuracy before training began."""
    best: float | None = None
    """The highest accuracy so far."""


class LastStepStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the last step, over its rollouts; None and 0 before the first."""

    reward: float | None = None
    """Mean reward."""
    rollouts_per_s: float = 0.0
    """Rollouts trained on per second, with the wait for them."""
    staleness_mean: float = 0.0
    """How many versions old they were, on average."""
    staleness_max: int = 0
    """How many versions old the oldest was."""
    entropy: float | None = None
    """Of the sampled tokens, in nats a token."""
    exact_entropy: float | None = None
    """Of the distributions that they were sampled from, where the run measures it."""
    length_mean: float | None = None
    """Tokens of an answer."""
    truncated: float | None = None
    """Share of the answers that ended for want of tokens."""
    optimizer_steps: int | None = None
    """Of which the step was made, where it was to be of several."""
    kl_old: float | None = None
    """KL from π_old over them, in nats a token, where that is known."""
    clip_fraction: float | None = None
    """Share of the trained tokens without gradient by clipping."""
    by_domain: dict[str, dict[str, float]] = {}
    """Of all groups that came since the step before, by domain; docs/watching.md says which figures there are."""
    by_tag: dict[str, dict[str, float]] = {}
    """The same by tag."""


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment."""

    run: str
    """Name of the run."""
    phase: StatusPhase = StatusPhase.STARTING
    step: int = 0
    """Steps taken."""
    total_steps: int = 0
    """Steps that the recipe asks for."""
    model_version: int = 0
    """Version of the trainer's weights."""
    epoch: int = 0
    """How many trainers have begun."""
    last_step: LastStepStatus = LastStepStatus()
    held_out: HeldOutStatus = HeldOutStatus()
    """Of the recipe's first evaluation set, by which it is decided."""
    other_sets: tuple[HeldOutStatus, ...] = ()
    """The same of its other evaluation sets, once they have been asked."""
    evaluating: EvaluatingStatus | None = None
    """The evaluation under way."""
    fleet: FleetStatus = FleetStatus()
    actors: tuple[ActorStatus, ...] = ()
    ledger: LedgerStatus = LedgerStatus()
    knobs: dict[str, Any] = {}
    """Values by name."""
    trainer: TrainerStatus | None = None
    alarms: tuple[str, ...] = ()
    """What is wrong with the run's last steps, a sentence each."""
    waiting_for: str = ""
    """What the run waits for now, in words; empty when it waits for nothing."""
    restarts: tuple[RestartStatus, ...] = ()
    """Processes that have died, where the launcher is on the controller's machine."""
    still_s: float = 0.0
    """For how long nothing at all has got on."""
    elapsed_s: float = 0.0
    """Age of the run."""
    eta_s: float | None = None
    """Time until the last step; None until a step has been taken."""

    def to_json(self) -> bytes:
        """Return the status as JSON, by the names of its fields."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> RunStatus:
        """Read what `to_json` wrote.

        Raises:
            ValueError: not JSON, or a field of the wrong type; the message names it.
        """
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"expected a run's status as JSON: {error}") from None


def format_duration(seconds: float) -> str:
    """Seconds in at most two units: `4.2 s`, `3 min 05 s`, `2 h 10 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
