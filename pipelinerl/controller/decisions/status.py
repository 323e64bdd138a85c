"""The status of a run for users: `run_status` derives it from the controller's state and `EngineWatch`.

The result, `RunStatus`, is served at `/status` and shown by the progress bar and the CLI.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from pipelinerl.controller.decisions.controller import Controller
from pipelinerl.controller.decisions.engine_decisions import to_stop
from pipelinerl.controller.decisions.giving_up import waiting_for
from pipelinerl.controller.decisions.watch import EngineLoad, EngineWatch
from pipelinerl.controller.routes import ActorAssignment
from pipelinerl.controller.state.evaluation import Evaluation, EvaluationResult
from pipelinerl.controller.state.fleet import EngineLifecycle, EngineRecord
from pipelinerl.controller.state.run_state import ControllerSettings, RunPhase, RunState, discarded_over
from pipelinerl.enums import Overdue, StalenessScope
from pipelinerl.observability import status


def run_status(
    controller: Controller, *, watch: EngineWatch, name: str, now: float, elapsed_s: float
) -> status.RunStatus:
    """Return a snapshot of the run for users; `now` is on the controller's monotonic clock."""
    state, evaluation = controller.state, controller.state.evaluations.current
    results, names = state.evaluations.results, {each.name: each.place for each in state.evaluations.results}
    evaluates_first = state.phase is RunPhase.TRAINING and evaluation is not None and state.version == 0
    reported = state.trainer.last_report
    remaining = controller.settings.run.steps - state.version
    done = state.version - state.trainer.first_version
    return status.RunStatus(
        run=name,
        phase=status.StatusPhase.EVALUATING if evaluates_first else status.StatusPhase(state.phase.value),
        step=state.version if state.trainer.begun else state.resumed_step,
        total_steps=controller.settings.run.steps,
        model_version=state.version,
        epoch=state.epoch,
        last_step=_last_step(state),
        held_out=_held_out([each for each in results if each.place == 0]),
        other_sets=tuple(
            _held_out([each for each in results if each.name == name])
            for name in sorted(names, key=lambda name: names[name])
            if names[name] > 0
        ),
        evaluating=None if evaluation is None else _evaluating(evaluation),
        fleet=_fleet(state, watch),
        actors=tuple(
            status.ActorStatus(name=alive.name, groups_in_flight=alive.groups_in_flight, silent_s=now - reported_at)
            for alive, reported_at in state.actors.values()
        ),
        ledger=status.LedgerStatus(**state.account.ledger()),
        knobs=state.knobs.to_json(),
        alarms=tuple(state.watched.alarms.values()),
        waiting_for=waiting_for(state, now=now),
        lag=controller.lag_sentence(),
        trainer=None if reported is None else status.TrainerStatus(last_report=reported[0], silent_s=now - reported[1]),
        still_s=now - state.watchdog.moved_at if state.watchdog.moved_at else 0.0,
        elapsed_s=elapsed_s,
        eta_s=remaining * (now - state.trainer.training_since) / done
        if done and state.trainer.training_since
        else None,
    )


def assignment_of(state: RunState, settings: ControllerSettings) -> ActorAssignment:
    """Return the current settings for actors, which are the same for every actor."""
    # Actors give up groups that are older than k, unless steps wait for overdue groups or k bounds single rollouts.
    drops = settings.scope is StalenessScope.GROUP and settings.overdue is Overdue.DROP
    gives_up = drops and not math.isinf(state.knobs.k)
    return ActorAssignment(
        serving=tuple(state.fleet.serving()),
        finishing=tuple(state.fleet.finishing()),
        groups_in_flight=state.knobs.groups_in_flight,
        model_version=state.version,
        k=state.knobs.k if gives_up else None,
    )


def _last_step(state: RunState) -> status.LastStepStatus:
    figures = state.trainer.last_step
    seconds = figures.get("step_s", 0.0) + figures.get("wait_s", 0.0)
    discarded, length_ratio = discarded_over(state.watched.recent)
    return status.LastStepStatus(
        reward=figures.get("reward"),
        unjudged=status.unjudged_share(state.watched.by_domain),
        rollouts_per_s=figures.get("rollouts", 0.0) / seconds if seconds else 0.0,
        staleness_mean=figures.get("staleness_mean", 0.0),
        staleness_max=int(figures.get("staleness_max", 0)),
        entropy=figures.get("entropy"),
        exact_entropy=figures.get("exact_entropy"),
        length_mean=figures.get("length_mean"),
        truncated=figures.get("truncated"),
        discarded=discarded,
        length_ratio=length_ratio,
        optimizer_steps=int(figures["optimizer_steps"]) if "optimizer_steps" in figures else None,
        kl_old=figures.get("kl_old"),
        clip_fraction=figures.get("clip_fraction"),
        by_domain=state.watched.by_domain,
        by_tag=state.watched.by_tag,
    )


def _held_out(results: Sequence[EvaluationResult]) -> status.HeldOutStatus:
    if not results:
        return status.HeldOutStatus()
    last = msgspec.to_builtins(results[-1])  # most fields have the same names in the status
    added = {
        "version": results[-1].model_version,
        "by_domain": [{"name": name, **figures} for name, figures in last["by_domain"].items()],
        "by_tag": [{"name": name, **figures} for name, figures in last["by_tag"].items()],
        "first": results[0].accuracy,
        "best": max((each.accuracy for each in results if each.accuracy is not None), default=None),
    }
    return msgspec.convert(last | added, status.HeldOutStatus)


def _fleet(state: RunState, watch: EngineWatch) -> status.FleetStatus:
    records, publish = state.fleet.records(), state.trainer.last_publish
    loads = {record.url: watch.load(record.url) for record in records}
    speeds = watch.speeds.of(state.fleet.serving())
    healthy = [loads[record.url] for record in records if record.lifecycle is EngineLifecycle.HEALTHY]
    return status.FleetStatus(
        engines=tuple(_engine(record, loads[record.url], speeds.get(record.url, 1.0)) for record in records),
        requested=tuple(
            status.RequestedEngine(name=request.name, type=request.type)
            for request in state.engine_requests
            if request.wanted
        ),
        to_stop=tuple(to_stop(state)),
        tokens_per_s=sum(load.tokens_per_s for load in loads.values()),
        occupancy=sum(load.occupancy for load in healthy) / len(healthy) if healthy else 0.0,
        update_pause_s=max(publish.pauses_s.values(), default=0.0) if publish else 0.0,
    )


def _evaluating(evaluation: Evaluation) -> status.EvaluatingStatus:
    return status.EvaluatingStatus(
        model_version=evaluation.model_version,
        pin=evaluation.pin.value,
        engine=evaluation.engine,
        answered=len(evaluation.answers),
        problems=evaluation.plan.problems,
        discarded=sum(evaluation.discarded.values()),
        restarts=evaluation.restarts,
        sets=tuple(each.name for each in evaluation.plan.sets),
    )


def _engine(record: EngineRecord, load: EngineLoad, speed: float) -> status.EngineStatus:
    pinned = record.pinned and record.lifecycle is EngineLifecycle.HEALTHY
    left = record.to_stop and record.lifecycle is EngineLifecycle.EXPELLED
    return status.EngineStatus(
        url=record.url,
        state="left" if left else "pinned" if pinned else record.lifecycle.value,
        name=record.name,
        type=record.type,
        version=record.loaded if record.loaded >= 0 else None,
        running=load.metrics.running_sequences,
        waiting=load.metrics.waiting_sequences,
        slots=load.metrics.slots,
        tokens_per_s=load.tokens_per_s,
        speed=speed,
        last_error=record.last_error,
    )
