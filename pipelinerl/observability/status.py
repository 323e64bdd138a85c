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


class PassAtStatus(msgspec.Struct, frozen=True, kw_only=True):
    """pass@k of the last evaluation, with its 95 % interval."""

    k: int
    value: float
    low: float
    high: float


class EvaluatingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The evaluation under way: of which version, on which engine alone, and how far it is.

    `pin` is how one version is seen to (`engine`, `gate`, `none`), `discarded` counts answers of other versions.
    """

    model_version: int
    pin: str
    engine: str = ""
    answered: int = 0
    problems: int = 0
    discarded: int = 0
    restarts: int = 0


class LedgerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The account of prompt orders: `issued` is the sum of the others at every step."""

    issued: int = 0
    trained: int = 0
    filtered: int = 0
    stale: int = 0
    failed: int = 0
    in_flight: int = 0


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment.

    Attributes:
        reward: mean over the rollouts of the last step.
        held_out_accuracy: of the last evaluation, with its 95 % interval; `first_accuracy` before training began. None
            where nothing was judged.
        held_out_version, held_out_one_version: of which weights that is, and whether every token is of them.
        held_out_incomplete: why not every problem has its answer; empty when all have.
        tokens_per_s: tokens sampled per second, over all engines.
        staleness_mean, staleness_max: over the rollouts of the last step, in versions.
        last_update_pause_s: the longest time that an engine stood still for the last weight update.
        engine_occupancy: share of the engines' slots that work, 0..1.
        requested, to_stop: engines beyond the recipe's that are to run; names of those, of any, that are to end.
        waiting_for: what the run waits for now, in words; empty when it waits for nothing.
        still_s: for how long nothing at all has got on.
        eta_s: None until a step has been taken.
    """

    run: str
    phase: StatusPhase = StatusPhase.STARTING
    step: int = 0
    total_steps: int = 0
    model_version: int = 0
    epoch: int = 0
    reward: float | None = None
    held_out_accuracy: float | None = None
    held_out_low: float | None = None
    held_out_high: float | None = None
    held_out_version: int | None = None
    held_out_one_version: bool = False
    held_out_incomplete: str = ""
    pass_at: tuple[PassAtStatus, ...] = ()
    evaluating: EvaluatingStatus | None = None
    first_accuracy: float | None = None
    best_accuracy: float | None = None
    tokens_per_s: float = 0.0
    rollouts_per_s: float = 0.0
    staleness_mean: float = 0.0
    staleness_max: int = 0
    last_update_pause_s: float = 0.0
    engine_occupancy: float = 0.0
    engines: tuple[EngineStatus, ...] = ()
    requested: tuple[RequestedEngine, ...] = ()
    to_stop: tuple[str, ...] = ()
    actors: tuple[ActorStatus, ...] = ()
    ledger: LedgerStatus = LedgerStatus()
    knobs: dict[str, Any] = {}
    trainer: TrainerStatus | None = None
    waiting_for: str = ""
    still_s: float = 0.0
    elapsed_s: float = 0.0
    eta_s: float | None = None

    def to_json(self) -> bytes:
        """As JSON."""
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
