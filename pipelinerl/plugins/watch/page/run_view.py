"""`RunView`: a run's current state for a viewer, built from its events one by one in bounded memory.

Pass every event to `take` once, in order. `steps` holds all steps. Of all other data only the newest are kept: chart
marks, knob changes, evaluations, active alarms, and the latest state of each engine.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from pipelinerl.observability.events import Event, cut, kind_of, sentence
from pipelinerl.observability.run_history import HELD_OUT, Incidents
from pipelinerl.plugins.watch.page.step_table import StepTable
from pipelinerl.plugins.watch.timeline.run_timeline import RunTimeline

#: Number of recent steps whose events are kept whole, which takes about 10 MB.
MOST_RECENT: Final = 500
_MOST_MARKS: Final = 2000
_MOST_CHANGES: Final = 1000
_MOST_ENGINES: Final = 1024
#: Maximum number of evaluation sets, and of active alarms.
_MOST_NAMES: Final = 256

_ENDS: Final = {"run_finished": "finished", "run_suspended": "suspended", "run_failed": "failed"}
_MARKS: Final = (
    "knobs", "evaluation", "checkpoint", "alarm", "alarm_cleared", "engine_joined", "engine_lost", "engine_left",
    "run_started",
)  # fmt: skip
_LIFECYCLES: Final = {
    "engine_joined": "joining",
    "engine_verified": "healthy",
    "engine_back": "healthy",
    "engine_suspect": "suspect",
    "engine_draining": "draining",
    "engine_lost": "lost",
    "engine_left": "left",
    "engine_canary_failed": "unverified",
}


@dataclass(slots=True)
class RunView:
    """The state of one run according to its log.

    Attributes:
        started, ended: the first `run_started` event; the last event that ends the run, None while the run is live.
        recent: the last `step` events.
        pauses_s: how long engines paused for each of the last weight updates.
        marks, mark_count: the last chart marks, and the number of all marks so far.
        held_out: the last evaluations as chart marks.
        evaluations: the newest evaluation of each set. alarms: the active alarms. engines: the state of each, by URL.
        given_up: for each step in `recent`, the number of groups that actors gave up since the step before.
        given_up_now: that number since the last step.
    """

    steps: StepTable = field(default_factory=StepTable)
    timeline: RunTimeline = field(default_factory=RunTimeline)
    started: Event = field(default_factory=dict)
    ended: Event | None = None
    newest: Event = field(default_factory=dict)
    recent: deque[Event] = field(default_factory=lambda: deque(maxlen=MOST_RECENT))
    pauses_s: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_RECENT))
    held_out: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_MARKS))
    marks: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_MARKS))
    mark_count: int = 0
    incidents: Incidents = field(default_factory=Incidents)
    knob_log: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_CHANGES))
    knobs: dict[str, Any] = field(default_factory=dict)
    evaluations: dict[str, Event] = field(default_factory=dict)
    alarms: dict[tuple[str, str], Event] = field(default_factory=dict)
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    fleet: Event = field(default_factory=dict)
    ledger: dict[str, Any] = field(default_factory=dict)
    given_up: deque[int] = field(default_factory=lambda: deque(maxlen=MOST_RECENT))
    given_up_now: int = 0

    @property
    def step(self) -> int:
        return self.steps.bounds[1]

    @property
    def state(self) -> str:
        """State in which the run ended: `finished`, `suspended` or `failed`; empty while the log shows no end."""
        return _ENDS[str(self.ended["kind"])] if self.ended is not None else ""

    def take(self, event: Event) -> bool:
        """Add the next event; return True if it undoes steps because the run resumed from an earlier step."""
        kind = kind_of(event)
        self.newest = event
        self.timeline.feed(event)
        rewound = False
        match kind:
            case "step":
                rewound = self._take_step(event)
            case "publish":
                pause, failed = event.get("pause_s"), event.get("failed")
                if isinstance(pause, float):
                    self.pauses_s.append(pause)
                for url, engine in self.engines.items():
                    if engine["state"] == "healthy" and not (isinstance(failed, dict) and url in failed):
                        engine["version"] = whole(event, "model_version")
            case "run_started":
                self.started, self.ended = self.started or event, None
                self.engines.clear()
                self.knobs = _table(event, "knobs") or self.knobs
            case _ if kind in _ENDS:
                self.ended, self.ledger = event, _table(event, "ledger")
            case "knobs" if isinstance(event.get("changes"), dict):
                self.knobs |= event["changes"]
                change = {name: event.get(name) for name in ("time", "step", "changes")}
                self.knob_log.append(change | {"who": cut(event.get("who", "")), "live": event.get("live", True)})
            case "evaluation":
                name = cut(event.get("name", HELD_OUT))
                if name in self.evaluations or len(self.evaluations) < _MOST_NAMES:
                    self.evaluations[name] = event
            case "engines":
                self.fleet = event
            case "alarm" | "alarm_cleared":
                key = (cut(event.get("alarm", "")), cut(event.get("domain", "")))
                if kind == "alarm_cleared":
                    self.alarms.pop(key, None)
                elif len(self.alarms) < _MOST_NAMES:
                    self.alarms[key] = event
            case "group_outdated":
                self.given_up_now += 1
        if kind in _LIFECYCLES:
            self._take_engine(_LIFECYCLES[kind], event)
        if kind in _MARKS:
            self._add_mark(kind, event)
        self.incidents.take(event)
        return rewound

    def marks_after(self, number: int) -> list[dict[str, Any]]:
        """Return the kept chart marks after the run's first `number` marks; all kept ones if it has had fewer marks."""
        new = self.mark_count - number
        kept = len(self.marks)
        return list(islice(self.marks, kept - min(kept, new) if new >= 0 else 0, None))

    def _take_step(self, event: Event) -> bool:
        rewound = self.steps.add(event)
        step = whole(event, "step")
        if step is not None:
            while self.recent and self.recent[-1]["step"] >= step:
                self.recent.pop()
                self.given_up.pop()
            self.recent.append({name: value for name, value in event.items() if name != "orders"})
            self.given_up.append(self.given_up_now)
            self.given_up_now = 0
        return rewound

    def _take_engine(self, lifecycle: str, event: Event) -> None:
        url = cut(event.get("url", ""))
        engine = self.engines.get(url)
        if engine is None:
            if len(self.engines) >= _MOST_ENGINES:
                return
            engine = self.engines[url] = {"url": url, "state": lifecycle, "version": None, "last_error": ""}
        if event.get("name"):
            engine["name"] = cut(event["name"])
        engine["state"] = lifecycle
        if event.get("reason"):
            engine["last_error"] = cut(event["reason"])
        engine["version"] = whole(event, "model_version", engine["version"])

    def _add_mark(self, kind: str, event: Event) -> None:
        step = whole(event, "step", whole(event, "model_version", self.step))
        mark = {"step": step, "elapsed_s": event.get("elapsed_s"), "kind": kind, "what": sentence(event)}
        if kind == "evaluation":
            mark["set"] = cut(event.get("name", HELD_OUT))
            mark |= {name: event.get(name) for name in ("accuracy", "low", "high")}
            self.held_out.append(mark)
        self.marks.append(mark)
        self.mark_count += 1


def _table(event: Event, name: str) -> dict[str, Any]:
    value = event.get(name)
    return dict(value) if isinstance(value, dict) else {}


def whole(event: Event, name: str, otherwise: int | None = None) -> int | None:
    """Return the field `name` if it is a non-negative integer; if not, return `otherwise`."""
    value = event.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else otherwise
