"""Seconds that each operation takes on some hardware, either calibrated or computed from published figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """Times of an engine: a decode step of n rows takes `step_s + row_s · n`.

    A prompt of t tokens, computed once per group, takes `prompt_token_s · t`.
    """

    step_s: float
    row_s: float = 0.0
    prompt_token_s: float = 0.0

    def decode_s(self, rows: int) -> float:
        """Return the time of one decode step with `rows` rows."""
        return self.step_s + self.row_s * rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerTimes:
    """Times of a trainer: `token_s` per token of a pass (prompts too), and `optimizer_step_s` per optimizer step."""

    token_s: float
    optimizer_step_s: float = 0.0

    def step_s(self, tokens: int, *, epochs: int, optimizer_steps: int) -> float:
        """Return the time of one step of the run, with `epochs` passes over the tokens."""
        return self.token_s * tokens * epochs + self.optimizer_step_s * optimizer_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTimes:
    """Times of an update: a publication takes `send_s` in the background, then each engine pauses for `pause_s`."""

    send_s: float = 0.0
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlTimes:
    """Times of everything except engine and trainer.

    Attributes:
        order_s: delay from the controller's order for a group of answers to a prompt until an actor claims the order.
        request_s: an actor's own work per rollout before sampling; an actor does one thing at a time.
        answer_s: an actor's own work per rollout after sampling.
        verify_s: time to judge a group, in the background.
        verifiers: number of groups that can be judged at the same time; None for no limit.
        deliver_s: delay of a group between actor and trainer.
        report_s: time between the end of a step and the moment when the trainer can begin the next one.
    """

    order_s: float = 0.0
    request_s: float = 0.0
    answer_s: float = 0.0
    verify_s: float = 0.0
    verifiers: int | None = None
    deliver_s: float = 0.0
    report_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """Factors, at least 1, by which engine and trainer slow down while the other computes on the same processors.

    If they are kept `apart`, with lag each has a part of the processors to itself, so the factors always apply; on
    policy they take turns, and each has all processors.
    """

    engine: float = 1.0
    trainer: float = 1.0
    apart: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices per hour of one engine and of the trainer, in any currency; 0 if unknown."""

    engine_hour: float = 0.0
    trainer_hour: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """All times and prices of some hardware."""

    engine: EngineTimes
    trainer: TrainerTimes
    update: UpdateTimes = UpdateTimes()
    control: ControlTimes = ControlTimes()
    contention: Contention = Contention()
    prices: Prices = Prices()
