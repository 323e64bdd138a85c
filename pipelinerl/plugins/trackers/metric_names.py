"""Names under which trackers receive the metrics of a run's events; docs/reference/trackers.md has the table.

`MetricReader` turns events into rows of metrics by step. The step of an evaluation is the evaluated version. Metrics of
engines, measured every second, are averaged and become part of the next step's row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from pipelinerl.observability.events import Event, amount, number
from pipelinerl.observability.run_history import HELD_OUT

#: Metric names for the fields of a `step` event.
STEP_METRICS: Final[Mapping[str, str]] = {
    "reward": "reward",
    "accuracy": "accuracy",
    "loss": "loss/policy",
    "value_loss": "loss/value",
    "ce_loss": "loss/ce",
    "kl_reference": "loss/kl_reference",
    "kl_teacher": "loss/kl_teacher",
    "kl_coefficient": "loss/kl_coefficient",
    "grad_norm": "optimizer/grad_norm",
    "learning_rate": "optimizer/learning_rate",
    "entropy": "policy/entropy",
    "exact_entropy": "policy/exact_entropy",
    "clip_fraction": "policy/clip_fraction",
    "truncated_fraction": "policy/is_truncated_fraction",
    "ratio_mean": "policy/ratio_mean",
    "ratio_max": "policy/ratio_max",
    "ess": "policy/ess",
    "kl_k1": "policy/kl_k1",
    "kl_k3": "policy/kl_k3",
    "length_mean": "length/mean",
    "length_p95": "length/p95",
    "length_max": "length/max",
    "truncated": "length/truncated",
    "staleness_mean": "staleness/mean",
    "staleness_max": "staleness/max",
    "mixed_version_fraction": "staleness/mixed_versions",
    "sampled_version": "staleness/sampled_version",
    "stale_tokens": "staleness/dropped_tokens_total",
    "stale_answers": "staleness/dropped_answers_total",
    "steps_ahead": "staleness/steps_ahead",
    "lag_cost": "staleness/cost_per_version",
    "j": "staleness/j",
    "rollouts": "batch/rollouts",
    "tokens": "batch/tokens",
    "sampled_tokens": "batch/sampled_tokens",
    "waiting_groups": "batch/waiting_groups",
    "idle_fraction": "batch/idle_fraction",
    "masked": "batch/masked",
    "unjudged": "verifier/unjudged",
    "wait_s": "perf/wait_s",
    "step_s": "perf/step_s",
    "publish_wait_s": "perf/publish_wait_s",
}
#: Metric names for the fields of `engines` events, which are averaged since the previous step.
ENGINE_METRICS: Final[Mapping[str, str]] = {
    "tokens_per_s": "perf/tokens_per_s",
    "occupancy": "perf/engine_occupancy",
    "running": "perf/running_sequences",
    "waiting": "perf/waiting_sequences",
}
#: Metric names for the fields of the `publish` event before a step.
PUBLISH_METRICS: Final[Mapping[str, str]] = {"pause_s": "perf/update_pause_s", "total_s": "perf/publish_s"}
#: Fields of an `evaluation` event, logged as `eval/<set>/<field>`; pass@k and maj@k for the recipe's k are added.
EVALUATION_METRICS: Final = ("accuracy", "low", "high", "length_mean", "truncated", "unjudged")
_CURVES: Final = {"pass_at": "pass", "majority_at": "maj"}
#: Name of a metric computed here: the trained tokens of a step, divided by the step's time including the wait.
TRAINED: Final = "perf/trained_tokens_per_s"
#: Prefixes of fields that become groups: `mismatch_<cause>_<figure>` is logged as `mismatch/<cause>_<figure>`.
_MISMATCH: Final = ("mismatch_", "old_mismatch_")


class MetricRow(NamedTuple):
    """Metrics of one step by name, and their time in Unix seconds."""

    step: int
    time: float
    figures: dict[str, float]


class HistoryRewind(NamedTuple):
    """A resume from a checkpoint, which invalidates the rows of `step` and later steps."""

    step: int


class ReaderState(msgspec.Struct):
    """State of a `MetricReader` between two events, from which another reader can continue."""

    last_step: int = 0
    looks: int = 0
    """Number of `engines` events since the last step."""
    sums: dict[str, float] = {}
    """Sums of the values in those `engines` events, by metric name."""
    published: dict[str, float] = {}


class MetricReader:
    """Reader of one run's events in order. `state` holds everything that another reader needs to continue."""

    def __init__(self, state: ReaderState | None = None) -> None:
        self.state = state or ReaderState()

    def read(self, event: Event) -> Iterator[MetricRow | HistoryRewind]:
        """Yield the rows of metrics, or the `HistoryRewind`, that follow from an event."""
        match event["kind"]:
            case "trainer_ready":
                version = int(event.get("model_version") or 0)
                if version < self.state.last_step:
                    self.state.last_step = version
                    yield HistoryRewind(version + 1)
            case "engines":
                self.state.looks += 1
                for name, value in _named(event, ENGINE_METRICS).items():
                    self.state.sums[name] = self.state.sums.get(name, 0.0) + value
            case "publish":
                self.state.published = _named(event, PUBLISH_METRICS)
            case "evaluation":
                place = f"eval/{event.get('name') or HELD_OUT}"
                figures = _named(event, {name: f"{place}/{name}" for name in EVALUATION_METRICS})
                for field, name in _CURVES.items():
                    figures |= {f"{place}/{name}@{each['k']}": float(each["value"]) for each in event.get(field) or ()}
                yield MetricRow(int(event.get("model_version") or 0), amount(event, "time"), figures)
            case "step":
                yield self._step(event)

    def _step(self, event: Event) -> MetricRow:
        state, step = self.state, int(event.get("step") or 0)
        figures = _named(event, STEP_METRICS) | state.published
        mismatch = [field for field in event if field.startswith(_MISMATCH)]
        figures |= _named(event, {field: field.replace("mismatch_", "mismatch/", 1) for field in mismatch})
        # Metrics by tag are left out, since there may be hundreds.
        for domain, each in (event.get("by_domain") or {}).items():
            figures |= _named(each, {name: f"domain/{domain}/{name}" for name in each})
        figures |= {name: total / state.looks for name, total in state.sums.items()}
        seconds = amount(event, "wait_s") + amount(event, "step_s")
        if seconds > 0 and "batch/tokens" in figures:
            figures[TRAINED] = figures["batch/tokens"] / seconds
        self.state = ReaderState(last_step=step)
        return MetricRow(step, amount(event, "time"), figures)


def _named(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float]:
    return {name: value for field, name in names.items() if (value := number(fields, field)) is not None}
