"""What takes how long: the values that a calibration finds, or that a hardware table gives (docs/simulation.md).

Times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """A decode step of n rows takes `step_s + row_s · n`, a prompt of t tokens `prompt_token_s · t` once per group."""

    step_s: float
    row_s: float = 0.0
    prompt_token_s: float = 0.0

    def decode_s(self, rows: int) -> float:
        """One token for each of so many rows."""
        return self.step_s + self.row_s * rows


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerTimes:
    """A pass over t tokens (prompts and answers) takes `token_s · t`, each optimizer step `optimizer_step_s` beside."""

    token_s: float
    optimizer_step_s: float = 0.0

    def step_s(self, tokens: int, *, epochs: int, optimizer_steps: int) -> float:
        """A step of the run: so many passes over the tokens, so many optimizer steps in all."""
        return self.token_s * tokens * epochs + self.optimizer_step_s * optimizer_steps


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTimes:
    """A publication takes `send_s` beside everything else, then each engine stands still for `pause_s`."""

    send_s: float = 0.0
    pause_s: float = 0.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ControlTimes:
    """What is neither engine nor trainer.

    Attributes:
        order_s: from the controller's decision to the actor that claims the order.
        request_s, answer_s: an actor's own work for a rollout, before it is sampled and after; an actor does one thing
            at a time.
        verify_s: judging a group, beside all else. verifiers: how many groups at once; None: any number.
        deliver_s: from the actor to the trainer. report_s: from the end of a step to the trainer's next one.
    """

    order_s: float = 0.0
    request_s: float = 0.0
    answer_s: float = 0.0
    verify_s: float = 0.0
    verifiers: int | None = None
    deliver_s: float = 0.0
    report_s: float = 0.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """How much slower each becomes while the other computes, where they share processors: factors of at least 1."""

    engine: float = 1.0
    trainer: float = 1.0

    @property
    def exists(self) -> bool:
        """Does either feel the other?"""
        return self.engine > 1.0 or self.trainer > 1.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Of an hour of one engine and of the trainer, in any currency; 0 where they are not told."""

    engine_hour: float = 0.0
    trainer_hour: float = 0.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """All of it."""

    engine: EngineTimes
    trainer: TrainerTimes
    update: UpdateTimes = UpdateTimes()
    control: ControlTimes = ControlTimes()
    contention: Contention = Contention()
    prices: Prices = field(default_factory=Prices)
