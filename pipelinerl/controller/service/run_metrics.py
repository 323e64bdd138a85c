"""The controller's `/metrics`: the run as a whole, and roles without a port of their own (trainer, actors, processes).

Engines and parameter servers serve their own metrics (`pipelinerl_engine_…`, `pipelinerl_parameter_server_…`). What the
controller knows about each engine is included here, by the engine's URL. docs/reference/prometheus.md lists the names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from pipelinerl.observability.status import Labels, RunStatus, Samples, StatusPhase, labelled_text

PREFIX: Final = "pipelinerl"

#: Figures of the last step, as reported by the trainer.
_TRAINER: Final = (
    "reward", "accuracy", "loss", "grad_norm", "learning_rate", "entropy", "ess", "clip_fraction", "length_mean",
    "truncated", "staleness_mean", "staleness_max", "wait_s", "step_s", "publish_wait_s", "waiting_groups",
)  # fmt: skip
_DOMAIN: Final = (
    "reward", "accuracy", "length_mean", "truncated", "stale", "verifier_s", "verifier_errors",
    "turns", "environment_s", "tool_errors",
)  # fmt: skip


def run_metrics(status: RunStatus, last_step: Mapping[str, float]) -> str:
    """Return the metrics as Prometheus text; `last_step` holds the figures of the last step by name."""
    ledger, fleet = status.ledger, status.fleet
    fates = ("issued", "trained", "filtered", "stale", "failed")
    metrics: dict[str, Samples] = {
        "steps_total": {(): status.step},
        "steps_planned": {(): status.total_steps},
        "model_version": {(): status.model_version},
        "trainer_epoch": {(): status.epoch},
        "run_elapsed_s": {(): status.elapsed_s},
        "run_still_s": {(): status.still_s},
        "run_phase": {_of("phase", phase.value): float(phase is status.phase) for phase in StatusPhase},
        "run_alarms": {(): len(status.alarms)},
        "orders_total": {_of("fate", fate): getattr(ledger, fate) for fate in fates},
        "orders_in_flight": {(): ledger.in_flight},
        "held_out_accuracy": {
            _of("set", each.name): each.accuracy
            for each in (status.held_out, *status.other_sets)
            if each.accuracy is not None
        },
        "fleet_tokens_per_s": {(): fleet.tokens_per_s},
        "fleet_occupancy": {(): fleet.occupancy},
        "fleet_update_pause_s": {(): fleet.update_pause_s},
        "fleet_engine_serves": {_engine(each.url, each.name): float(each.serves) for each in fleet.engines},
        "fleet_engine_version": {_engine(each.url, each.name): each.version for each in fleet.engines},
        "trainer_silent_s": {(): status.trainer.silent_s} if status.trainer is not None else {},
        "actor_silent_s": {_of("actor", each.name): each.silent_s for each in status.actors},
        "actor_groups_in_flight": {_of("actor", each.name): each.groups_in_flight for each in status.actors},
        "process_deaths_total": {_of("process", each.name): each.deaths for each in status.restarts},
    }
    for name in _TRAINER:
        value = last_step.get(name, math.nan)
        metrics[f"trainer_{name}"] = {(): value} if math.isfinite(value) else {}
    for name in _DOMAIN:
        by_domain = status.last_step.by_domain.items()
        metrics[f"domain_{name}"] = {_of("domain", domain): each[name] for domain, each in by_domain if name in each}
    return labelled_text(metrics, prefix=PREFIX)


def _of(label: str, value: str) -> Labels:
    return ((label, value),)


def _engine(url: str, name: str) -> Labels:
    return (("url", url), ("name", name))
