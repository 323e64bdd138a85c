"""The status of a run for users: `run_status` derives it from the controller's state and `EngineWatch`.

The result, `RunStatus`, is served at `/status` and shown by the progress bar and the CLI. `EngineWatch` keeps the
newest load of each engine, as polled; it is not part of the journal or of checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from inference_contract.schemas import EngineMetrics
from pipelinerl.controller.decisions.controller import Controller
from pipelinerl.controller.decisions.engine_decisions import to_stop
from pipelinerl.controller.decisions.engine_speeds import EngineSpeeds
from pipelinerl.controller.decisions.giving_up import waiting_for
from pipelinerl.controller.routes import ActorAssignment
from pipelinerl.controller.state.evaluation import EvaluationResult
from pipelinerl.controller.state.fleet import EngineLifecycle, EngineRecord
from pipelinerl.controller.state.run_state import ControllerSettings, Discarded, RunPhase, RunState
from pipelinerl.enums import Overdue, StalenessScope
from pipelinerl.observability import status


def run_status(
    controller: Controller, *, watch: EngineWatch, name: str, now: float, elapsed_s: float
) -> status.RunStatus:
    """Return a snapshot of the run for users; `now` is on the controller's monotonic clock."""
    state = controller.state
    remaining = controller.settings.run.steps - state.version
    done = state.version - state.trainer.first_version
    return status.RunStatus(
        run=name,
        phase=_phase(state),
        step=state.version if state.trainer.begun else state.resumed_step,
        total_steps=controller.settings.run.steps,
        model_version=state.version,
        epoch=state.epoch,
        last_step=_last_step(state),
        held_out=_held_out([each for each in state.evaluations.results if each.place == 0]),
        other_sets=_other_sets(state.evaluations.results),
        evaluating=_evaluating(state),
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
        trainer=_trainer(state, now=now),
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
    discarded = Discarded.over(state.watched.recent)
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
        discarded=discarded.share,
        length_ratio=discarded.length_ratio,
        optimizer_steps=int(figures["optimizer_steps"]) if "optimizer_steps" in figures else None,
        kl_old=figures.get("kl_old"),
        clip_fraction=figures.get("clip_fraction"),
        by_domain=state.watched.by_domain,
        by_tag=state.watched.by_tag,
    )


def _other_sets(results: Sequence[EvaluationResult]) -> tuple[status.HeldOutStatus, ...]:
    names = {each.name: each.place for each in results if each.place > 0}
    in_order = sorted(names, key=lambda name: names[name])
    return tuple(_held_out([each for each in results if each.name == name]) for name in in_order)


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


def _phase(state: RunState) -> status.StatusPhase:
    if state.phase is RunPhase.TRAINING and state.evaluations.current is not None and state.version == 0:
        return status.StatusPhase.EVALUATING
    return status.StatusPhase(state.phase.value)


def _evaluating(state: RunState) -> status.EvaluatingStatus | None:
    evaluation = state.evaluations.current
    if evaluation is None:
        return None
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


def _trainer(state: RunState, *, now: float) -> status.TrainerStatus | None:
    if state.trainer.last_report is None:
        return None
    report, reported_at = state.trainer.last_report
    return status.TrainerStatus(last_report=report, silent_s=now - reported_at)


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


#: Maximum number of steady engines (joining or healthy) that are polled per second.
POLLS_PER_S: Final = 128
#: An engine is late to answer a poll after this many times its usual time, and at least this many seconds.
_LATE_TIMES: Final = 3.0
_LATE_S: Final = 2.0
#: The usual time is the longest recent one, which fades by this factor with each answer.
_FADES: Final = 0.95
_STEADY: Final = (EngineLifecycle.JOINING, EngineLifecycle.HEALTHY)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load of one engine as of its newest poll; rates cover the time between its two newest polls.

    `occupancy` is the mean share of slots (room for one sequence each) that decode a sequence. It includes time in
    which the engine has no work, for example because prompt orders, a verifier or the trainer are late. An engine that
    does not measure its busy seconds counts as always busy. `idle_since` is when the engine was first seen without
    work; None while it has work.
    """

    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    tokens_per_s: float = 0.0
    occupancy: float = 0.0
    polled_at: float = 0.0
    missed_polls: int = 0
    idle_since: float | None = None


_UNKNOWN: Final = EngineLoad()


class EngineWatch:
    """The load of each engine by base URL, computed from polls. Pure: time and poll results are arguments."""

    def __init__(self, *, polls_to_death: int = 5) -> None:
        self._loads: dict[str, EngineLoad] = {}
        self._polled_at: dict[str, float] = {}
        self._answers_s: dict[str, float] = {}
        self.speeds = EngineSpeeds()
        self._polls_to_death = polls_to_death

    def load(self, url: str) -> EngineLoad:
        """Return the load of the engine at `url`; all zeros if the engine is unknown."""
        return self._loads.get(url, _UNKNOWN)

    def to_poll(self, records: Sequence[EngineRecord], *, now: float, every_s: float) -> list[str]:
        """Return the engines to poll now, given that this is called every `every_s` seconds.

        Of the steady engines (joining or healthy), at most `POLLS_PER_S` a second are polled, least recently polled
        first, so the cost is bounded and even. Engines in other states, such as suspect or draining, are polled every
        time.
        """
        most = math.ceil(POLLS_PER_S * every_s)
        steady = [each.url for each in records if each.lifecycle in _STEADY]
        chosen = [each.url for each in records if each.lifecycle not in _STEADY]
        chosen += sorted(steady, key=lambda url: self._polled_at.get(url, -math.inf))[:most]
        self._polled_at |= dict.fromkeys(chosen, now)
        return chosen

    def answered(self, url: str, metrics: EngineMetrics, now: float) -> bool:
        """Record an engine's answer to a poll; return True if its counters went down, so it must have restarted."""
        known = self.load(url)
        previous, seconds = known.metrics, now - known.polled_at
        restarted = (
            metrics.generated_tokens_total < previous.generated_tokens_total
            or metrics.weight_updates_total < previous.weight_updates_total
        )
        fresh = restarted or known.polled_at == 0.0 or seconds <= 0
        rate = 0.0 if fresh else (metrics.generated_tokens_total - previous.generated_tokens_total) / seconds
        if restarted:
            self.speeds.forget(url)
        elif not fresh:
            self.speeds.note(
                url,
                steps=metrics.decode_steps_total - previous.decode_steps_total,
                rows=metrics.occupied_slot_steps_total - previous.occupied_slot_steps_total,
                busy_s=metrics.busy_s_total - previous.busy_s_total,
            )
        idle = not metrics.running_sequences and not metrics.waiting_sequences
        self._loads[url] = EngineLoad(
            metrics=metrics,
            idle_since=(known.idle_since or now) if idle else None,
            polled_at=now,
            tokens_per_s=rate,
            occupancy=0.0 if fresh else _occupancy(previous, metrics, seconds),
        )
        return restarted

    def on_missed_poll(self, url: str) -> bool:
        """Record a missed poll; return True if the engine has missed several in a row and now counts as dead."""
        known = self.load(url)
        missed = known.missed_polls + 1
        is_dead = missed >= self._polls_to_death
        if is_dead:
            metrics = known.metrics.model_copy(update={"running_sequences": 0, "waiting_sequences": 0})
            known = replace(known, metrics=metrics, tokens_per_s=0.0, occupancy=0.0)
        self._loads[url] = replace(known, missed_polls=missed)
        return is_dead

    def note_answer_s(self, url: str, seconds: float) -> None:
        """Record how long the engine took to answer a poll."""
        self._answers_s[url] = max(seconds, _FADES * self._answers_s.get(url, 0.0))

    def is_late(self, url: str, waited_s: float) -> bool:
        """Return True if a poll's answer is late: after three times the usual time, at least `_LATE_S` seconds."""
        return waited_s > max(_LATE_S, _LATE_TIMES * self._answers_s.get(url, 0.0))

    def on_late_poll(self, url: str) -> None:
        """Set the rates of an engine that does not answer to zero, since the last ones describe the past."""
        self._loads[url] = replace(self.load(url), tokens_per_s=0.0, occupancy=0.0)

    def forget(self, url: str) -> None:
        """Drop the data of an engine that is no longer polled."""
        self._answers_s.pop(url, None)
        self.speeds.forget(url)
        self._loads.pop(url, None)
        self._polled_at.pop(url, None)


#: A parameter server is down after this many missed polls in a row; one that has never answered may still be starting.
_SERVER_MISSES: Final = 2
_STARTING_MISSES: Final = 30


@dataclass(slots=True)
class _Server:
    shard: int
    replica: int
    state: str = "starting"
    missed: int = 0
    error: str = ""


class ServerWatch:
    """The parameter servers that answer polls, and the shards of the weights that no server provides. Pure.

    `urls` are ordered by shard: the first `len(urls) / shards` servers are the replicas of shard 0.
    """

    def __init__(self, urls: Sequence[str] = (), *, shards: int = 1) -> None:
        replicas = len(urls) // shards
        self._servers = {url: _Server(at // replicas, at % replicas) for at, url in enumerate(urls)}
        self._lost_shards: set[int] = set()

    @property
    def urls(self) -> Sequence[str]:
        """The servers to poll."""
        return list(self._servers)

    def answered(self, url: str) -> list[tuple[str, dict[str, Any]]]:
        """Record an answer of the server; return the events that follow, as kind and fields."""
        server = self._servers[url]
        was_down, server.state, server.missed, server.error = server.state == "down", "up", 0, ""
        return [self._event("parameter_server_back", url), *self._alarms()] if was_down else []

    def missed(self, url: str, reason: str) -> list[tuple[str, dict[str, Any]]]:
        """Record a missed poll; return the events that follow, as kind and fields."""
        server = self._servers[url]
        server.missed, server.error = server.missed + 1, reason
        most = _STARTING_MISSES if server.state == "starting" else _SERVER_MISSES
        if server.state == "down" or server.missed < most:
            return []
        server.state = "down"
        return [self._event("parameter_server_lost", url, reason=reason), *self._alarms()]

    def statuses(self) -> tuple[status.ParameterServerStatus, ...]:
        """Return the servers as the run's status shows them."""
        return tuple(
            status.ParameterServerStatus(
                url=url, shard=each.shard, replica=each.replica, state=each.state, last_error=each.error
            )
            for url, each in self._servers.items()
        )

    def alarms(self) -> tuple[str, ...]:
        """Return a sentence for each shard without a server."""
        return tuple(map(self._sentence, sorted(self._lost_shards)))

    def _alarms(self) -> list[tuple[str, dict[str, Any]]]:
        provided = {each.shard for each in self._servers.values() if each.state != "down"}
        lost = {each.shard for each in self._servers.values()} - provided
        raised, self._lost_shards = self._lost_shards, lost
        events = [("alarm", {**self._of(shard), "what": self._sentence(shard)}) for shard in sorted(lost - raised)]
        return events + [("alarm_cleared", self._of(shard)) for shard in sorted(raised - lost)]

    def _sentence(self, shard: int) -> str:
        urls = ", ".join(url for url, each in self._servers.items() if each.shard == shard)
        return f"no parameter server of shard {shard} answers ({urls}), so engines get no new weights; restart one"

    @staticmethod
    def _of(shard: int) -> dict[str, Any]:
        return {"alarm": "parameter_servers", "domain": f"shard {shard}"}

    def _event(self, kind: str, url: str, **fields: str) -> tuple[str, dict[str, Any]]:
        server = self._servers[url]
        return kind, {"url": url, "shard": server.shard, "replica": server.replica, **fields}


def _occupancy(before: EngineMetrics, after: EngineMetrics, seconds: float) -> float:
    """Return the share of busy slots (0 to 1) between two polls of an engine that are `seconds` apart."""
    steps = after.decode_steps_total - before.decode_steps_total
    if steps <= 0 or not after.slots:
        return 0.0
    rows = (after.occupied_slot_steps_total - before.occupied_slot_steps_total) / (steps * after.slots)
    busy_s = after.busy_s_total - before.busy_s_total
    return rows * min(1.0, busy_s / seconds) if after.busy_s_total else rows
