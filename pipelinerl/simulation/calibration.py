"""`calibrate`: a finished run's events to the `Hardware` that it ran on.

    engine         `engines` events: busy seconds by decode steps, rows and prompt tokens, non-negative least squares
    trainer        `step` events: computing seconds by tokens and optimizer steps; where tokens hardly vary, by tokens
    update         `publish` events
    verification   the traced groups of `step` events
    report         what of a step's period is neither its wait nor its own
    actor          what is left: such that the run, simulated, has steps as long as it had
    contention     with a second run, in which engine and trainer work at once: how much slower they are

The best first run is a synchronous one (`staleness.preset="on_policy"`): nothing in it hides behind anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from statistics import fmean
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from inference_contract.weights import OnUpdate
from pipelinerl.errors import UserError
from pipelinerl.observability.events import Event
from pipelinerl.observability.run_history import tell
from pipelinerl.simulation.hardware import (
    Contention,
    ControlTimes,
    EngineTimes,
    Hardware,
    TrainerTimes,
    UpdateTimes,
)
from pipelinerl.simulation.measured import Measured, counted_steps, measure
from pipelinerl.simulation.setting import SimulatedSetting
from pipelinerl.simulation.simulator import simulate

#: Tokens of steps that differ by less than this share of their mean do not tell a slope.
_SPREAD: Final = 0.2
#: An actor's work on a rollout is looked for up to this.
_MOST_ACTOR_S: Final = 0.05
_HALVINGS: Final = 9
#: Steps of the simulated runs by which it is found.
_TRIED_STEPS: Final = 40
#: Transit of an order and of a group through the streams.
_TRANSIT_S: Final = 0.002


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRun:
    """A run that is over: its events, and what its recipe decides."""

    events: Sequence[Event]
    setting: SimulatedSetting


def calibrate(runs: Sequence[ObservedRun]) -> Hardware:
    """The hardware that the first run shows; what slows down beside each other, the others.

    Raises:
        UserError: a run is too short, or its engine does not count its busy seconds.
    """
    first, *others = runs
    measured = measure(first.events)
    hardware = Hardware(
        engine=_engine_times(first.events),
        trainer=_trainer_times(first),
        update=_update_times(first),
        control=ControlTimes(
            order_s=_TRANSIT_S, deliver_s=_TRANSIT_S, verify_s=_verify_s(first.events), report_s=measured.report_s
        ),
    )
    hardware = _with_actor(hardware, first, measured)
    return _with_contention(hardware, others) if others else hardware


def _engine_times(events: Sequence[Event]) -> EngineTimes:
    names = ("decode_steps", "row_steps", "prompt_tokens")
    looks = [event for event in events if event["kind"] == "engines" and "busy_s" in event]
    rows, busy = [], []
    for before, after in pairwise(looks):
        change = [float(after[name]) - float(before[name]) for name in names]
        seconds = float(after["busy_s"]) - float(before["busy_s"])
        if seconds > 0 and change[0] > 0 and min(change) >= 0:
            rows.append(change)
            busy.append(seconds)
    if len(rows) < len(names):
        raise UserError(
            "the run's engines events do not say how long engines were busy (busy_s): its engine counts no such time, "
            "or the run is too short; give a hardware table with --hardware"
        )
    step_s, row_s, prompt_token_s = _nonnegative(np.array(rows), np.array(busy))
    return EngineTimes(step_s=max(step_s, 1e-9), row_s=row_s, prompt_token_s=prompt_token_s)


def _trainer_times(run: ObservedRun) -> TrainerTimes:
    steps = [step for step, _ in counted_steps(run.events)]
    seconds = np.array([float(step["step_s"]) - float(step["publish_wait_s"]) for step in steps])
    tokens = np.array([float(step["tokens"]) for step in steps]) * run.setting.epochs
    if float(np.ptp(np.percentile(tokens, (5, 95)))) < _SPREAD * float(tokens.mean()):
        return TrainerTimes(token_s=float(seconds.sum() / tokens.sum()))
    made = np.full_like(tokens, run.setting.optimizer_steps)
    token_s, optimizer_step_s = _nonnegative(np.stack([tokens, made], axis=1), seconds)
    return TrainerTimes(token_s=token_s, optimizer_step_s=optimizer_step_s)


def _update_times(run: ObservedRun) -> UpdateTimes:
    """Under `drain`, the rows' end is part of a publication's time, and comes on its own in a simulation."""
    published = [event for event in tell(run.events).publications if event.get("total_s") is not None]
    if not published:
        return UpdateTimes()
    pause_s = fmean(float(event.get("pause_s") or 0.0) for event in published)
    if run.setting.on_update is OnUpdate.DRAIN:
        return UpdateTimes(send_s=fmean(float(event["send_s"]) for event in published), pause_s=pause_s)
    return UpdateTimes(
        send_s=max(0.0, fmean(float(event["total_s"]) for event in published) - pause_s), pause_s=pause_s
    )


def _verify_s(events: Sequence[Event]) -> float:
    stages = [traced for event in events if event["kind"] == "step" for traced in event.get("stages", ())]
    return fmean(max(0.0, float(traced[3]) - float(traced[2])) for traced in stages) if stages else 0.0


def _with_actor(hardware: Hardware, run: ObservedRun, measured: Measured) -> Hardware:
    """An actor's work on a rollout, half of it before sampling, that lets the simulated steps last as they did."""

    def of(actor_s: float) -> Hardware:
        control = replace(hardware.control, request_s=actor_s / 2, answer_s=actor_s / 2)
        return replace(hardware, control=control)

    setting = replace(run.setting, steps=_TRIED_STEPS)
    low, high = 0.0, _MOST_ACTOR_S
    if simulate(setting, of(low)).step_s >= measured.step_s:
        return of(low)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if simulate(setting, of(middle)).step_s < measured.step_s else (low, middle)
    return of((low + high) / 2)


def _with_contention(hardware: Hardware, runs: Sequence[ObservedRun]) -> Hardware:
    """Both are slower by a factor while the other works; found from how slow they were in all of a run.

    The share of time in which they work at once is the simulation's, which the factors change: twice is enough.
    """
    engine = [_busy_s(run.events, _engine_times(run.events)) / _busy_s(run.events, hardware.engine) for run in runs]
    trainer = [_trainer_times(run).token_s / hardware.trainer.token_s for run in runs]
    found = hardware
    for _ in range(2):
        predictions = [simulate(replace(run.setting, steps=_TRIED_STEPS), found) for run in runs]
        busy = [1 - prediction.engine_idle for prediction in predictions]
        computes = [prediction.trainer_computes for prediction in predictions]
        found = replace(
            hardware,
            contention=Contention(
                engine=max(1.0, 1 + fmean((e - 1) / max(c, 0.1) for e, c in zip(engine, computes, strict=True))),
                trainer=max(1.0, 1 + fmean((t - 1) / max(b, 0.1) for t, b in zip(trainer, busy, strict=True))),
            ),
        )
    return found


def _busy_s(events: Sequence[Event], times: EngineTimes) -> float:
    """What the decoding of a run takes by `times`."""
    looks = [event for event in events if event["kind"] == "engines" and "busy_s" in event]
    first, last = looks[0], looks[-1]
    change = {name: float(last[name]) - float(first[name]) for name in ("decode_steps", "row_steps", "prompt_tokens")}
    return (
        times.step_s * change["decode_steps"]
        + times.row_s * change["row_steps"]
        + times.prompt_token_s * change["prompt_tokens"]
    )


def _nonnegative(columns: NDArray[np.float64], values: NDArray[np.float64]) -> list[float]:
    """Least squares [n] with coefficients of at least 0: of all sets of columns whose solution has them, the best."""
    count = columns.shape[1]
    best, found = float(values @ values), [0.0] * count
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            part = columns[:, chosen]
            solution, *_ = np.linalg.lstsq(part, values, rcond=None)
            rest = values - part @ solution
            if (solution >= 0).all() and float(rest @ rest) < best:
                best, found = float(rest @ rest), [0.0] * count
                for place, value in zip(chosen, solution, strict=True):
                    found[place] = float(value)
    return found
