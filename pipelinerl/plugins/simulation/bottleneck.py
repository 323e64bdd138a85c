"""`pipelinerl bottleneck`: what a run's parts waited for, and which one change would help most.

The first half is measured: for each stretch of steps, the trainer's time by what it did, and the cause of its waits.
The second half is simulated: the simulator is calibrated with the run's newest part, repeats it, and tries each change.
A change is worth its simulated ratio to the unchanged run, applied to the run's own seconds. Both halves read files
only, so the run may be live.
"""

from __future__ import annotations

import json as json_text
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Final

import typer

from inference_contract.weights import OnUpdate
from pipelinerl.commands.remote import recorded_events
from pipelinerl.errors import PipelineError, UserError
from pipelinerl.observability.events import Event, amount
from pipelinerl.observability.run_history import tell
from pipelinerl.observability.usage import usage_by_role
from pipelinerl.plugins.simulation.calibration import (
    TRUSTED,
    ObservedRun,
    calibrate,
    evaluations,
    judged,
    measure,
    stage_s,
)
from pipelinerl.plugins.simulation.from_recipe import observed
from pipelinerl.plugins.simulation.hardware import Hardware
from pipelinerl.plugins.simulation.setting import SimulatedSetting
from pipelinerl.plugins.simulation.simulator import simulate
from pipelinerl.roles.role import RunPath
from pipelinerl.staleness import AUTO, StalenessBounds
from pipelinerl.verifiers.worker_pool import num_cores

#: A run is divided into at most this many stretches, of at least `_LEAST_STEPS` steps each.
_STRETCHES: Final = 5
_LEAST_STEPS: Final = 6
#: Engines that are busy for this share of the time are what the trainer waits for.
_BUSY: Final = 0.8
#: Steps of each simulated run, and how many are simulated for a median.
_STEPS: Final = 60
_DRAWS: Final = 3
#: A change is recommended only if it saves at least this share of a step.
_WORTH: Final = 0.03
#: Changes that save less than this share are listed only in the JSON output.
_VISIBLE: Final = 0.01
#: Knobs that change a run's pace, by the field of `SimulatedSetting` or by name.
_PACE: Final = frozenset({"j", "k", "rollouts_per_step", "groups_in_flight"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Some consecutive steps.

    Attributes:
        computes, waits, held, rest: shares of the trainer's time: computing, waiting for samples, waiting for a
            publication, and between a step's end and the next one.
        engines_busy: share of the serving engines' time in which they have rows; None if not recorded.
        judging: groups that are judged at the same time, mean.
        evaluates: share of the time in which an evaluation is in progress.
        waits_for: what the run waits for most.
    """

    first: int
    last: int
    step_s: float
    computes: float
    waits: float
    held: float
    rest: float
    engines_busy: float | None
    judging: float
    evaluates: float
    waits_for: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of a run: `keys` are its recipe keys, if it has any; `step_s` the predicted seconds of a step."""

    name: str
    keys: str
    step_s: float


def stretches(events: Sequence[Event]) -> list[Stretch]:
    """Return the run's stretches. Raises UserError if it has fewer than `_LEAST_STEPS` steps, or an older log."""
    steps = tell(events).steps
    count = min(_STRETCHES, (len(steps) - 1) // _LEAST_STEPS)
    if count < 1:
        raise UserError(f"the run has {len(steps)} steps; at least {_LEAST_STEPS + 1} are needed, so let it run longer")
    edges = [number * (len(steps) - 1) // count for number in range(count + 1)]
    try:
        return [_stretch(events, steps[a], steps[a + 1 : b + 1]) for a, b in pairwise(edges)]
    except KeyError as error:
        raise UserError(f"the run's steps do not report {error}: an older version made it; run it again") from None


def _stretch(events: Sequence[Event], before: Event, steps: Sequence[Event]) -> Stretch:
    start, end = amount(before, "elapsed_s"), amount(steps[-1], "elapsed_s")
    seconds = max(end - start, 1e-9)
    held, waits = (sum(float(step[name]) for step in steps) for name in ("publish_wait_s", "wait_s"))
    computes = sum(float(step["step_s"]) for step in steps) - held
    verdicts, each_s = judged(steps)
    overlaps = (min(until, end) - max(since, start) for since, until in evaluations(events))
    made = {
        "computes": computes / seconds,
        "waits": waits / seconds,
        "held": held / seconds,
        "rest": max(0.0, seconds - computes - waits - held) / seconds,
    }
    starts = any(event["kind"] == "trainer_ready" and start < amount(event, "elapsed_s") <= end for event in events)
    busy, evaluates = _busy(events, start, end), sum(max(0.0, each) for each in overlaps) / seconds
    return Stretch(
        first=int(steps[0]["step"]),
        last=int(steps[-1]["step"]),
        step_s=seconds / len(steps),
        **made,
        engines_busy=busy,
        judging=verdicts * each_s / seconds,
        evaluates=evaluates,
        waits_for=_cause(
            made,
            starts=starts,
            busy=busy,
            evaluates=evaluates,
            sampling_s=stage_s(steps, 1),
            judging_s=stage_s(steps, 2),
        ),
    )


def _cause(
    shares: Mapping[str, float],
    *,
    starts: bool,
    busy: float | None,
    evaluates: float,
    sampling_s: float,
    judging_s: float,
) -> str:
    """Return what the run waits for most: the trainer itself, or the cause of the time in which it does not compute.

    Where engines limit a run, a publication that holds the trainer only takes the place of a wait for samples.
    """
    idle = shares["waits"] + shares["held"]
    if shares["computes"] >= max(idle, shares["rest"]):
        return "the trainer"
    if shares["rest"] > idle:
        return "a trainer that starts again" if starts else "the controller"
    if evaluates > idle / 2:
        return "evaluations"
    if judging_s > sampling_s:
        return "verifiers"
    if busy is None or busy >= _BUSY:
        return "engines"
    if shares["held"] > shares["waits"]:
        return "publications"
    return "engines, which rest while it computes" if busy >= _BUSY * shares["waits"] else "orders: engines are idle"


def _busy(events: Sequence[Event], start: float, end: float) -> float | None:
    looks = [event for event in events if event["kind"] == "engines" and start <= amount(event, "elapsed_s") <= end]
    if len(looks) < 2:
        return None
    seconds = amount(looks[-1], "elapsed_s") - amount(looks[0], "elapsed_s")
    busy_s = amount(looks[-1], "busy_s") - amount(looks[0], "busy_s")
    if busy_s > 0 and seconds > 0:
        return min(1.0, busy_s / seconds / max(1, serving(events, until=end)))
    return fmean(amount(event, "occupancy") for event in looks)


def serving(events: Sequence[Event], *, until: float = float("inf")) -> int:
    """Return the number of engines that serve at the time `until`, in seconds since the run began."""
    urls: set[str] = set()
    for event in events:
        if amount(event, "elapsed_s") > until:
            break
        if event["kind"] in ("engine_verified", "engine_back"):
            urls.add(event["url"])
        elif event["kind"] in ("engine_lost", "engine_suspect", "engine_draining"):
            urls.discard(event["url"])
        elif event["kind"] == "run_started":
            urls.clear()
    return len(urls)


def newest_part(run: ObservedRun) -> ObservedRun:
    """Return the part of the run since its pace or its number of engines changed, with the setting of that part."""
    setting, start, engines = run.setting, 0, 0
    for number, event in enumerate(run.events):
        changes = event.get("changes") if event["kind"] == "knobs" else None
        if isinstance(changes, dict) and _PACE & changes.keys():
            j = changes.get("j", AUTO if setting.auto_j else setting.bounds.j)
            bounds = StalenessBounds(1 if j == AUTO else int(j), float(changes.get("k", setting.bounds.k)))
            changed: dict[str, Any] = {"bounds": bounds, "auto_j": j == AUTO}
            changed |= {
                name: int(changes[name]) for name in ("rollouts_per_step", "groups_in_flight") if name in changes
            }
            start, setting = number, replace(setting, **changed)
        elif event["kind"].startswith("engine_") and (now := serving(run.events[: number + 1])) != engines:
            start, engines = (number if engines and now else start), now or engines
    return ObservedRun(events=run.events[start:], setting=replace(setting, engines=engines or setting.engines))


def tried(run: ObservedRun, *, actor_s: float) -> tuple[float, list[Change]]:
    """Return the simulation's relative error for a step of the run, and all changes, the most helpful first.

    An actor spends at most `actor_s` on a rollout.

    Raises UserError if the run lacks data for a calibration, ValueError if the simulated run deadlocks.
    """
    hardware, measured = calibrate([run], most_actor_s=actor_s), measure(run.events)
    unchanged = _simulated_s(run.setting, hardware)
    changes = [
        Change(name=name, keys=keys, step_s=measured.step_s * _simulated_s(setting, changed) / unchanged)
        for name, keys, setting, changed in _candidates(run.setting, hardware)
    ]
    return unchanged / measured.step_s - 1, sorted(changes, key=lambda change: change.step_s)


def actor_seconds(run_dir: Path) -> float:
    """Return the processor seconds that the run's actors spent on each rollout; 0 if they were not measured."""
    steps = tell(recorded_events(run_dir)).steps
    used, rollouts = usage_by_role(run_dir).get("actor"), sum(amount(step, "rollouts") for step in steps)
    return used.cpu_s / rollouts if used and rollouts else 0.0


def _simulated_s(setting: SimulatedSetting, hardware: Hardware) -> float:
    draws = (replace(setting, steps=_STEPS, seed=setting.seed + draw) for draw in range(_DRAWS))
    return median(simulate(each, hardware).step_s for each in draws)


def _candidates(setting: SimulatedSetting, hardware: Hardware) -> Iterator[tuple[str, str, SimulatedSetting, Hardware]]:
    engines, slots, control, trainer = setting.engines, setting.slots, hardware.control, hardware.trainer
    j, k = setting.bounds.j, setting.bounds.k
    yield "one more engine", f"engine.count={engines + 1}", replace(setting, engines=engines + 1), hardware
    twice = replace(trainer, token_s=trainer.token_s / 2, optimizer_step_s=trainer.optimizer_step_s / 2)
    yield "a trainer twice as fast", "", setting, replace(hardware, trainer=twice)
    if not setting.auto_j:
        later = StalenessBounds(j + 1, max(k, j + 1))
        yield "j + 1", f"staleness.j={later.j} staleness.k={later.k:g}", replace(setting, bounds=later), hardware
    if k < float("inf"):
        larger = StalenessBounds(j, 2 * k)
        yield "a larger k", f"staleness.k={larger.k:g}", replace(setting, bounds=larger), hardware
    yield "twice the slots", f"engine.slots={2 * slots}", replace(setting, slots=2 * slots), hardware
    held = 2 * setting.groups_in_flight
    yield "more in flight", f"actor.groups_in_flight={held}", replace(setting, groups_in_flight=held), hardware
    yield "one more actor", f"actor.count={setting.actors + 1}", replace(setting, actors=setting.actors + 1), hardware
    if control.verify_s:
        faster = replace(control, verify_s=control.verify_s / 2)
        yield "verifiers twice as fast", "", setting, replace(hardware, control=faster)
    if control.verifiers is not None:
        more = replace(control, verifiers=2 * control.verifiers)
        yield "twice the verifier workers", "domains.verifier_workers", setting, replace(hardware, control=more)
    if setting.on_update in (OnUpdate.DRAIN, OnUpdate.ABORT):
        in_flight = replace(setting, on_update=OnUpdate.CONTINUE)
        yield "in-flight updates", "engine.on_update=continue", in_flight, hardware


def bottleneck(
    run_dir: RunPath,
    json: Annotated[bool, typer.Option("--json", help="Print every figure as JSON.")] = False,
) -> None:
    """Show what a run waited for, and which one change would help most; the run may be live."""
    events = recorded_events(run_dir)
    found = stretches(events)
    error, changes, refusal, now_s = None, list[Change](), "", found[-1].step_s
    try:
        part = newest_part(observed(run_dir))
        error, changes = tried(part, actor_s=actor_seconds(run_dir))
        now_s = measure(part.events).step_s
    except (PipelineError, ValueError) as reason:
        refusal = f"no change was simulated: {reason}"
    best = changes[0] if changes and changes[0].step_s < now_s * (1 - _WORTH) else None
    # The share of this machine's processors that the run's processes used; None if they were not measured.
    used = sum(usage.cpu_s for usage in usage_by_role(run_dir).values())
    seconds = tell(events).duration_s
    processors = used / seconds / num_cores() if used and seconds else None
    if json:
        figures = {
            "stretches": [asdict(each) for each in found],
            "step_s": now_s,
            "changes": [asdict(change) for change in changes],
            "recommended": None if best is None else asdict(best),
            "simulation_error": error,
            "processors": processors,
            "refusal": refusal,
        }
        typer.echo(json_text.dumps(figures))
        return
    for line in (*_table(found), *_advice(now_s, changes, best, error), *([refusal] if refusal else [])):
        typer.echo(line)
    if processors is not None and processors > _BUSY:
        typer.echo(
            f"processors: {processors:.0%} of this machine's {num_cores()} are busy, so more processes on it slow each "
            "other down; the predictions assume free processors"
        )


def _table(found: Sequence[Stretch]) -> list[str]:
    head = ("steps", "s/step", "computes", "waits", "held", "rest", "engines busy", "judging", "evaluates", "waits for")
    rows = [
        (
            f"{each.first}–{each.last}",
            f"{each.step_s:.3g}",
            *(f"{share:.0%}" for share in (each.computes, each.waits, each.held, each.rest)),
            "–" if each.engines_busy is None else f"{each.engines_busy:.0%}",
            f"{each.judging:.1f}",
            f"{each.evaluates:.0%}",
            each.waits_for,
        )
        for each in found
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)), row[-1]])
        for row in (head, *rows)
    ]


def _advice(now_s: float, changes: Sequence[Change], best: Change | None, error: float | None) -> Iterator[str]:
    if error is None:
        return
    for change in [change for change in changes if change.step_s < now_s * (1 - _VISIBLE)]:
        keys = f" ({change.keys})" if change.keys else ""
        yield f"{change.name}{keys}: {now_s:.3g} → {change.step_s:.3g} s a step (simulated)"
    trust = "" if abs(error) <= TRUSTED else "NOT TO BE TRUSTED: "
    yield f"{trust}a step of the simulated run takes {error:+.0%} compared with the measured ones"
    if best is None:
        yield f"no single change saves {_WORTH:.0%} of a step"
    else:
        yield f"most helpful: {best.name}, {now_s:.3g} → {best.step_s:.3g} s a step (simulated)"
