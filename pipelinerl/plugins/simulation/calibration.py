"""`calibrate` estimates the `Hardware` of finished runs from their events; `measure` computes a run's means.

The times of each part come from these data:

    engine         `engines` events: busy seconds, fitted to decode steps, rows and prompt tokens
    trainer        `step` events: computing seconds, fitted to tokens and, if tokens vary enough, optimizer steps
    update         `publish` events
    verification   the traced groups of `step` events
    report         the part of a step's period that is neither waiting nor computing
    actor          fitted last, to make simulated steps take as long as real ones
    contention     runs after the first, in which engine and trainer work at once: how much each slows down

The first run should be synchronous (`staleness.mode="on_policy"`), so that no two activities overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from statistics import fmean
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from inference_contract.weights import OnUpdate
from pipelinerl.errors import UserError
from pipelinerl.observability.events import Event, amount
from pipelinerl.observability.run_history import groups_of, mean_of, tell
from pipelinerl.plugins.simulation.hardware import (
    Contention,
    ControlTimes,
    EngineTimes,
    Hardware,
    TrainerTimes,
    UpdateTimes,
)
from pipelinerl.plugins.simulation.prediction import FILLS, Prediction
from pipelinerl.plugins.simulation.setting import SimulatedSetting
from pipelinerl.plugins.simulation.simulator import simulate

#: If tokens per step vary by less than this share of their mean, no time per optimizer step can be fitted.
_SPREAD: Final = 0.2
#: Calibration searches between 0 and this number of seconds for the time that an actor itself spends on a rollout.
_MOST_ACTOR_S: Final = 0.05
_HALVINGS: Final = 9
#: Number of trainer steps in each run that calibration simulates.
_TRIED_STEPS: Final = 40
#: Groups queue at verifiers if judging one takes more than this multiple of the verifiers' own time for it, while more
#: than `_WORKS` verifiers work on average.
_QUEUES: Final = 1.5
_WORKS: Final = 0.5
#: Counters of an engine's work in `engines` events, in the order of the fields of `EngineTimes`.
_WORK: Final = ("decode_steps", "row_steps", "prompt_tokens")
#: Transit time of orders for prompts and of rollout groups through the streams, in seconds.
_TRANSIT_S: Final = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRun:
    """A finished run: its events, and the settings from its recipe."""

    events: Sequence[Event]
    setting: SimulatedSetting
    threads: int = 1
    """Compute threads of each process."""


def calibrate(runs: Sequence[ObservedRun], *, most_actor_s: float = _MOST_ACTOR_S) -> Hardware:
    """Estimate the first run's hardware, and contention from the other runs. Raises UserError if a run lacks data.

    An actor's own time is what nothing else explains, so a run whose parts overlap needs a limit, `most_actor_s`.
    """
    first, *others = runs
    measured = measure(first.events)
    verify_s, verifiers = _verification(first)
    hardware = Hardware(
        engine=_engine_times(first.events),
        trainer=_trainer_times(first),
        update=_update_times(first),
        control=ControlTimes(
            order_s=_TRANSIT_S,
            deliver_s=_TRANSIT_S,
            verify_s=verify_s,
            verifiers=verifiers,
            report_s=measured.report_s,
        ),
    )
    hardware = _with_actor(hardware, first, measured, most_s=min(most_actor_s, _MOST_ACTOR_S))
    return _with_contention(hardware, first, others) if others else hardware


def _engine_times(events: Sequence[Event]) -> EngineTimes:
    looks = [event for event in events if event["kind"] == "engines" and "busy_s" in event]
    rows, busy = [], []
    for before, after in pairwise(looks):
        change = [float(after[name]) - float(before[name]) for name in _WORK]
        seconds = float(after["busy_s"]) - float(before["busy_s"])
        if seconds > 0 and change[0] > 0 and min(change) >= 0:
            rows.append(change)
            busy.append(seconds)
    if len(rows) < len(_WORK):
        raise UserError(
            "the run's engines events lack busy seconds (busy_s): its engine does not count them, "
            "or the run is too short; give a hardware table with --hardware"
        )
    step_s, row_s, prompt_token_s = _nonnegative(np.array(rows), np.array(busy))
    return EngineTimes(step_s=max(step_s, 1e-9), row_s=row_s, prompt_token_s=prompt_token_s)


def _trainer_times(run: ObservedRun) -> TrainerTimes:
    steps = [step for step, _ in counted_steps(run.events)]
    try:
        seconds = np.array([float(step["step_s"]) - float(step["publish_wait_s"]) for step in steps])
        tokens = np.array([float(step["tokens"]) for step in steps]) * run.setting.epochs
    except KeyError as error:
        raise _too_old(error) from None
    if float(np.ptp(np.percentile(tokens, (5, 95)))) < _SPREAD * float(tokens.mean()):
        return TrainerTimes(token_s=float(seconds.sum() / tokens.sum()))
    made = np.full_like(tokens, run.setting.optimizer_steps)
    token_s, optimizer_step_s = _nonnegative(np.stack([tokens, made], axis=1), seconds)
    return TrainerTimes(token_s=token_s, optimizer_step_s=optimizer_step_s)


def _update_times(run: ObservedRun) -> UpdateTimes:
    """Return the means of `send_s` and `pause_s` over the run's publications; 0 if there were none.

    In `drain` mode an engine also waits until its rows have ended. The simulator computes this wait, so `send_s` does
    not include it.
    """
    published = [event for event in tell(run.events).publications if event.get("total_s") is not None]
    if not published:
        return UpdateTimes()
    pause_s = fmean(float(event.get("pause_s") or 0.0) for event in published)
    if run.setting.on_update is OnUpdate.DRAIN:
        return UpdateTimes(send_s=fmean(float(event["send_s"]) for event in published), pause_s=pause_s)
    return UpdateTimes(
        send_s=max(0.0, fmean(float(event["total_s"]) for event in published) - pause_s), pause_s=pause_s
    )


def stage_s(events: Sequence[Event], first: int) -> float:
    """Return the mean seconds from stage `first` of traced groups to the next: 1 is sampling, 2 is judging."""
    stages = [traced for event in events if event["kind"] == "step" for traced in event.get("stages", ())]
    return fmean(max(0.0, float(traced[first + 1]) - float(traced[first])) for traced in stages) if stages else 0.0


def judged(events: Sequence[Event]) -> tuple[float, float]:
    """Return the number of verdicts in `step` events, and the verifiers' seconds for each, without queues."""
    steps = [event for event in events if event["kind"] == "step"]
    figures = [each for groups in groups_of(steps, "by_domain").values() for each in groups]
    return sum(amount(each, "verified") for each in figures), mean_of(figures, "verifier_s", weight="verified") or 0.0


def _verification(run: ObservedRun) -> tuple[float, int | None]:
    """Return the seconds to judge a group, and how many groups are judged at once if others had to wait.

    By Little's law, the verifiers' seconds per second are the number of groups that they judge at once.
    """
    counted = counted_steps(run.events)
    verify_s = stage_s(run.events, 2)
    verdicts, each_s = judged([step for step, _ in counted])
    own_s, at_once = each_s * run.setting.group_size, verdicts * each_s / sum(seconds for _, seconds in counted)
    if verify_s <= _QUEUES * own_s or at_once < _WORKS:
        return verify_s, None
    return own_s, max(1, round(at_once))


def _with_actor(hardware: Hardware, run: ObservedRun, measured: Measured, *, most_s: float) -> Hardware:
    """Fit an actor's own seconds per rollout, half of them before sampling, so that simulated steps match real ones."""

    def of(actor_s: float) -> Hardware:
        control = replace(hardware.control, request_s=actor_s / 2, answer_s=actor_s / 2)
        return replace(hardware, control=control)

    setting = replace(run.setting, steps=_TRIED_STEPS)
    low, high = 0.0, most_s
    if simulate(setting, of(low)).step_s >= measured.step_s:
        return of(low)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if simulate(setting, of(middle)).step_s < measured.step_s else (low, middle)
    return of((low + high) / 2)


def _with_contention(hardware: Hardware, first: ObservedRun, runs: Sequence[ObservedRun]) -> Hardware:
    """Fit how much engine and trainer slow each other down when both are busy.

    `runs` are runs in which both work at once; their times are compared with those of `hardware`, which the `first` run
    showed. If each had more threads in the first run, they are slower in the others all the time.
    """
    # Each iteration simulates with the current factors, to find when engine and trainer both work. Two iterations are
    # enough.
    engine = [_busy_s(run.events, _engine_times(run.events)) / _busy_s(run.events, hardware.engine) for run in runs]
    trainer = [_trainer_times(run).token_s / hardware.trainer.token_s for run in runs]
    if all(run.threads < first.threads for run in runs):
        return replace(
            hardware,
            contention=Contention(engine=max(1.0, fmean(engine)), trainer=max(1.0, fmean(trainer)), apart=True),
        )
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
    looks = [event for event in events if event["kind"] == "engines" and "busy_s" in event]
    first, last = looks[0], looks[-1]
    steps, rows, prompt_tokens = (float(last[name]) - float(first[name]) for name in _WORK)
    return times.step_s * steps + times.row_s * rows + times.prompt_token_s * prompt_tokens


def _nonnegative(columns: NDArray[np.float64], values: NDArray[np.float64]) -> list[float]:
    """Return the least-squares coefficients [n] of the columns, each at least 0, by trying all subsets of columns."""
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


#: Smallest number of `counted_steps` with which a run can be compared with a simulation.
_FEWEST: Final = 6
#: A simulation is trusted if its results differ from the measured ones by at most this share.
TRUSTED: Final = 0.10
#: Fields of `Measured` and `Prediction` that are compared to judge a simulation.
JUDGED: Final = ("step_s", "tokens_per_s")
#: Number of simulations of which the median is used; odd, so that the median is one of them.
DRAWS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run's measured means over its `counted_steps`; fields are named as in `Prediction`.

    `compute_s` excludes the wait for a publication. `report_s` is the time between the end of a step and the next step.
    """

    steps: int
    step_s: float
    tokens_per_s: float
    trainer_wait: float
    staleness_mean: float
    discarded: float
    compute_s: float
    report_s: float

    def errors(self, prediction: Prediction) -> Mapping[str, float]:
        """Return simulated ÷ measured − 1 for each field that `JUDGED` names."""
        return {name: getattr(prediction, name) / getattr(self, name) - 1 for name in JUDGED}


def counted_steps(events: Sequence[Event]) -> list[tuple[Event, float]]:
    """Return the steps that count as steady state, each with the seconds since the previous step.

    These are the steps after the first fifth of the run, except those during which an evaluation ran.

    Raises UserError if there are too few.
    """
    steps = tell(events).steps
    evaluated = evaluations(events)
    pairs = [(after, _at(after) - _at(before)) for before, after in pairwise(steps)]
    counted = [
        (step, seconds)
        for step, seconds in pairs[max(0, len(steps) // FILLS - 1) :]
        if seconds > 0 and not any(since < _at(step) and until > _at(step) - seconds for since, until in evaluated)
    ]
    if len(counted) < _FEWEST:
        raise UserError(
            f"expected at least {_FEWEST} steps after the first fifth without a concurrent evaluation, got "
            f"{len(counted)} of {len(steps)}: a run must be longer to be simulated"
        )
    return counted


def measure(events: Sequence[Event]) -> Measured:
    """Measure a finished run over its `counted_steps`. Raises UserError if the events lack data."""
    counted = counted_steps(events)
    steps, seconds = [step for step, _ in counted], sum(period for _, period in counted)
    try:
        compute = [float(step["step_s"]) - float(step["publish_wait_s"]) for step in steps]
        waits = [float(step["wait_s"]) for step in steps]
        idle = [period - float(step["step_s"]) - float(step["wait_s"]) for step, period in counted]
        sampled = [float(step["sampled_tokens"]) for step in steps]
        stale = float(steps[-1]["stale_tokens"]) - float(steps[0]["stale_tokens"])
        return Measured(
            steps=len(steps),
            step_s=seconds / len(steps),
            tokens_per_s=sum(sampled) / seconds,
            trainer_wait=sum(waits) / seconds,
            staleness_mean=fmean(float(step["staleness_mean"]) for step in steps),
            discarded=stale / (stale + sum(sampled[1:])),
            compute_s=fmean(compute),
            report_s=max(0.0, fmean(idle)),
        )
    except KeyError as error:
        raise _too_old(error) from None


def _too_old(missing: KeyError) -> UserError:
    return UserError(
        f"the run's steps do not report {missing}: it was made by an older version of the project; run it again"
    )


def evaluations(events: Sequence[Event]) -> list[tuple[float, float]]:
    """Return when evaluations began and ended, in seconds since the run began."""
    spans: list[tuple[float, float]] = []
    began: float | None = None
    for event in events:
        if event["kind"] == "evaluation_began":
            began = _at(event)
        elif event["kind"] == "evaluation" and began is not None:
            spans.append((began, _at(event)))
            began = None
    return spans if began is None else [*spans, (began, float("inf"))]


def _at(event: Mapping[str, Any]) -> float:
    return float(event.get("elapsed_s") or 0.0)


def simulated_like(events: Sequence[Event], setting: SimulatedSetting, hardware: Hardware) -> Prediction:
    """Simulate the run several times, for its number of steps; return the prediction with the median step time."""
    # Before its steady state, a short run's waits depend on the answer lengths, which each simulation draws
    # differently.
    steps = len(tell(events).steps)
    runs = [simulate(replace(setting, steps=steps, seed=setting.seed + draw), hardware) for draw in range(DRAWS)]
    return sorted(runs, key=lambda run: run.step_s)[DRAWS // 2]
