"""`RunHistory`: a run's events by kind, as used by the report, the charts and the summary.

A resumed run may take a step twice; then the later event counts. Step, publication and evaluation events are sorted by
step or model version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

from pipelinerl.observability.events import ENDS, Event, amount, kind_of, number

#: Name of the evaluation set if an event does not name its set.
HELD_OUT: Final = "held_out"
#: Metrics that judge the weights which sampled the answers, not those of the step that trained on them.
OF_SAMPLER: Final = ("reward", "accuracy")


#: Kinds of incidents, the most harmful first: kinds in one row are equally harmful.
_HARM: Final = (
    ("run_failed", "run_failing"),
    ("engine_lost", "engine_canary_failed", "trainer_lost", "parameter_server_lost", "controller_returned",
     "rewind_failed"),
    ("stalled", "orders_lost", "checkpoint_delayed", "group_failed", "step_skipped", "evaluation_restarted", "rewind"),
    ("engine_suspect", "engine_slow"),
    ("alarm",),
    ("knobs",),
)  # fmt: skip
_HARM_OF: Final = {kind: harm for harm, kinds in enumerate(_HARM) for kind in kinds}
#: For each kind that ends incidents of the same subject, the kinds that it ends.
_ENDED_BY: Final = {
    "engine_back": ("engine_suspect", "engine_lost"),
    "engine_verified": ("engine_suspect", "engine_lost", "engine_canary_failed"),
    "engine_lost": ("engine_suspect",),
    "engine_left": ("engine_suspect", "engine_lost", "engine_canary_failed"),
    "parameter_server_back": ("parameter_server_lost",),
    "alarm_cleared": ("alarm",),
    "step": ("stalled",),
    "checkpoint": ("checkpoint_delayed",),
}
_MOST_INCIDENTS: Final = 500


@dataclass(slots=True, kw_only=True)
class Incident:
    """Something that went wrong, with all its repetitions: one engine's losses, or one alarm.

    Attributes:
        event: its newest event. count: the number of its events.
        seconds: its duration so far, without times between repetitions. since: `elapsed_s` of its newest beginning;
            None if it is over.
    """

    kind: str
    event: Event
    count: int = 0
    seconds: float = 0.0
    since: float | None = None


class Incidents:
    """The incidents of a run, at most `_MOST_INCIDENTS`, from its events in order."""

    def __init__(self) -> None:
        self._incidents: dict[tuple[str, str], Incident] = {}
        self._has_trainer = False
        self._elapsed_s = 0.0

    def take(self, event: Event) -> None:
        """Add the next event; events that are no incident may end one."""
        kind = kind_of(event)
        self._elapsed_s = max(self._elapsed_s, amount(event, "elapsed_s"))
        if kind == "trainer_ready":
            kind = "trainer_lost" if self._has_trainer else kind
            self._has_trainer = True
        elif kind in ("trainer_left", "run_started"):
            self._has_trainer = False
        for ended in _ENDED_BY.get(kind, ()):
            if (over := self._incidents.get((ended, _subject(ended, event)))) is not None:
                over.seconds += self._open_s(over)
                over.since = None
        if kind not in _HARM_OF:
            return
        key = kind, _subject(kind, event)
        if key not in self._incidents and len(self._incidents) >= _MOST_INCIDENTS:
            least = self.ranked()[-1]
            if _HARM_OF[least.kind] < _HARM_OF[kind]:
                return
            del self._incidents[least.kind, _subject(least.kind, least.event)]
        incident = self._incidents.setdefault(key, Incident(kind=kind, event=event))
        incident.event, incident.count = event, incident.count + 1
        if incident.since is None and any(kind in ended for ended in _ENDED_BY.values()):
            incident.since = self._elapsed_s

    def ranked(self) -> list[Incident]:
        """Return copies, the most harmful kinds first, then by duration and number, with durations up to now."""
        now = [replace(each, seconds=each.seconds + self._open_s(each)) for each in self._incidents.values()]
        return sorted(now, key=lambda each: (_HARM_OF[each.kind], -each.seconds, -each.count))

    def _open_s(self, incident: Incident) -> float:
        return 0.0 if incident.since is None else self._elapsed_s - incident.since


def _subject(kind: str, event: Event) -> str:
    """Return the subject of an incident of this kind: an engine's URL, or an alarm's kind and domain."""
    fields = {"alarm": ("alarm", "domain"), "stalled": (), "checkpoint_delayed": ()}.get(kind, ("url",))
    return " ".join(str(event.get(name, "")) for name in fields)


@dataclass(frozen=True, slots=True)
class Series:
    """Points (x, y) of one metric; `x` and `y` are both [n]."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __bool__(self) -> bool:
        return bool(self.x)

    def smoothed(self) -> Series:
        """Return the moving average; its window extends by a fortieth of the series' length to each side."""
        reach = len(self.y) // 40
        total = [0.0]
        for value in self.y:
            total.append(total[-1] + value)
        means = []
        for here in range(len(self.y)):
            start, end = max(0, here - reach), min(len(self.y), here + reach + 1)
            means.append((total[end] - total[start]) / (end - start))
        return Series(self.x, tuple(means))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """The events of a run, sorted by kind.

    Attributes:
        steps: `step` events by rising step. publications: `publish` events by rising model version.
        evaluation_sets: for each set's name, its `evaluation` events by rising model version; the recipe's first set
            comes first.
        incidents: what went wrong, the most harmful first.
        finished: the last `run_finished`, `run_failed` or `run_suspended`, if the run is over.
    """

    started: Event
    finished: Event | None
    steps: tuple[Event, ...]
    evaluation_sets: Mapping[str, tuple[Event, ...]]
    publications: tuple[Event, ...]
    engines: tuple[Event, ...]
    knobs: tuple[Event, ...]
    incidents: tuple[Incident, ...]
    checkpoint: str = ""
    """Path of the newest checkpoint; empty if there is none."""

    @property
    def evaluations(self) -> tuple[Event, ...]:
        """Evaluations of the recipe's first set, which selects the best checkpoints."""
        return next(iter(self.evaluation_sets.values()), ())

    @property
    def run(self) -> str:
        return str(self.started.get("run", "run"))

    @property
    def duration_s(self) -> float:
        ended = () if self.finished is None else (self.finished,)
        evaluations = (event for events in self.evaluation_sets.values() for event in events)
        known = (self.started, *self.steps, *self.publications, *self.engines, *evaluations, *ended)
        return max(amount(event, "elapsed_s") for event in known)

    @property
    def sampled_tokens(self) -> int:
        return int(sum(self.series(self.steps, "sampled_tokens").y))

    @property
    def first_accuracy(self) -> float | None:
        """Held-out accuracy of the first evaluation that has one; None if no later evaluation does."""
        known = self.series(self.evaluations, "accuracy", x="model_version").y
        return known[0] if len(known) > 1 else None

    @property
    def last_evaluation(self) -> Event | None:
        return next((event for event in reversed(self.evaluations) if number(event, "accuracy") is not None), None)

    @property
    def other_accuracies(self) -> list[tuple[str, float | None, float]]:
        """Tuples (name, first accuracy if there are several, last accuracy) of the sets after the recipe's first."""
        others = list(self.evaluation_sets.items())[1:]
        known = [(name, self.series(events, "accuracy", x="model_version").y) for name, events in others]
        return [(name, values[0] if len(values) > 1 else None, values[-1]) for name, values in known if values]

    @property
    def _tenth(self) -> int:
        return max(1, len(self.steps) // 10)

    @property
    def first_reward(self) -> float | None:
        """Mean reward over the first tenth of the steps; None before the second step."""
        return None if len(self.steps) < 2 else _mean(self.by_step("reward").y[: self._tenth])

    @property
    def last_reward(self) -> float | None:
        """Mean reward over the last tenth of the steps."""
        return _mean(self.by_step("reward").y[-self._tenth :])

    @property
    def unjudged(self) -> float | None:
        """Share of the answers without a verdict over the last tenth of the steps, which `last_reward` leaves out."""
        by_domain = groups_of(self.steps[-self._tenth :], "by_domain").values()
        figures = [{"unjudged": 0.0, **each} for domain in by_domain for each in domain]
        return mean_of(figures, "unjudged")

    def median(self, events: Sequence[Event], field: str) -> float | None:
        values = self.series(events, field).y
        return median(values) if values else None

    def max_of(self, events: Sequence[Event], field: str) -> float | None:
        return max(self.series(events, field).y, default=None)

    def series(self, events: Sequence[Event], y: str, *, x: str = "elapsed_s") -> Series:
        """Return the fields `x` and `y` as a series, from the events in which both are numbers."""
        pairs = [(number(event, x), number(event, y)) for event in events]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        return Series(tuple(a for a, _ in known), tuple(b for _, b in known))

    def by_step(self, field: str) -> Series:
        return self.series(self.steps, field, x="step")

    def by_sampling_version(self) -> Series:
        """Return the reward of the trained answers as a series over the model version that sampled them.

        A step's batch was sampled by older weights than those that it trains. The reward stands at the mean version of
        the judged answers' tokens: that of the first token would flatter in-flight updates, since newer weights sampled
        the rest. Logs of older versions of the project report only the age of the oldest token, which is used instead.
        """
        return self.series(placed_by_version(self.steps), "reward", x="sampled_version")

    def update_ms(self, field: str) -> Series:
        """Return a field of the `publish` events, in milliseconds, as a series over the model version."""
        seconds = self.series(self.publications, field, x="model_version")
        return Series(seconds.x, tuple(1e3 * value for value in seconds.y))

    def accuracy(self, events: Sequence[Event]) -> tuple[Series, tuple[float, ...], tuple[float, ...]]:
        """Return accuracy by model version, and its intervals' low and high ends, both empty if any is unknown."""
        accuracy, low, high = (self.series(events, field, x="model_version") for field in ("accuracy", "low", "high"))
        return (accuracy, low.y, high.y) if low.x == high.x == accuracy.x else (accuracy, (), ())


def tell(events: Sequence[Event]) -> RunHistory:
    """Build the history of a run from the events of its log; without events, the history is empty."""
    by_kind: dict[str, list[Event]] = {}
    for event in events:
        by_kind.setdefault(str(event["kind"]), []).append(event)
    # A resumed run writes another `run_started`; events before it that ended the run do not count.
    last_start = max((at for at, event in enumerate(events) if event["kind"] == "run_started"), default=-1)
    ends = [event for event in events[last_start + 1 :] if event["kind"] in ENDS]
    incidents = Incidents()
    for event in events:
        incidents.take(event)
    return RunHistory(
        started=next(iter(by_kind.get("run_started", [])), {}),
        finished=ends[-1] if ends else None,
        steps=_latest(by_kind.get("step", []), "step"),
        evaluation_sets=_by_set(by_kind.get("evaluation", [])),
        publications=_latest(by_kind.get("publish", []), "model_version"),
        engines=tuple(by_kind.get("engines", [])),
        knobs=tuple(by_kind.get("knobs", [])),
        incidents=tuple(incidents.ranked()),
        checkpoint=str(by_kind.get("checkpoint", [{}])[-1].get("path", "")),
    )


def _by_set(events: Sequence[Event]) -> dict[str, tuple[Event, ...]]:
    """Group evaluations by set, in the order of the sets in the recipe; older logs have one unnamed set."""
    # If two sets have the same place because the recipe was edited, the one that was evaluated last comes first.
    order: dict[str, tuple[float, int]] = {}
    for position, event in enumerate(events):
        order[str(event.get("name", HELD_OUT))] = (amount(event, "place"), -position)
    return {
        name: _latest([event for event in events if event.get("name", HELD_OUT) == name], "model_version")
        for name in sorted(order, key=lambda name: order[name])
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _latest(events: Sequence[Event], key: str) -> tuple[Event, ...]:
    latest = {event[key]: event for event in events if number(event, key) is not None}
    return tuple(latest[value] for value in sorted(latest))


def sampling_version(step: Mapping[str, Any]) -> float:
    """Return the mean version of the weights that sampled the batch of a `step` event; see `by_sampling_version`."""
    known = number(step, "sampled_version")
    return amount(step, "step") - (number(step, "staleness_mean") or 1.0) if known is None else known


def placed_by_version(steps: Iterable[Event]) -> list[Event]:
    """Return the `step` events with their `sampled_version`, in rising order of it."""
    placed = [step | {"sampled_version": sampling_version(step)} for step in steps]
    return sorted(placed, key=lambda step: step["sampled_version"])


def groups_of(steps: Iterable[Event], field: str) -> dict[str, list[Mapping[str, Any]]]:
    """Return the metrics of each domain (`by_domain`) or tag (`by_tag`) in the steps that report it, sorted by name."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for step in steps:
        figures = step.get(field)
        for name, each in figures.items() if isinstance(figures, dict) else ():
            if isinstance(each, dict):
                by_name.setdefault(name, []).append(each)
    return dict(sorted(by_name.items()))


def mean_of(figures: Iterable[Mapping[str, Any]], name: str, *, weight: str = "rollouts") -> float | None:
    """Return the mean of the metric `name`, weighted by the field `weight`; None if the weights sum to 0."""
    pairs = [(value, amount(each, weight)) for each in figures if (value := number(each, name)) is not None]
    total = sum(of for _, of in pairs)
    return sum(value * of for value, of in pairs) / total if total else None


def stale_share(figures: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of stale groups among all groups that arrived; None if no group arrived."""
    stale, others = (sum(amount(each, field) for each in figures) for field in ("stale_groups", "groups"))
    return stale / (stale + others) if stale + others else None
