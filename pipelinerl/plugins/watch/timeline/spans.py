"""Conversion of a run's events to spans. A span is an activity (track) of a part of the run (lane), with its times.

    for event in log:
        for span in reader.read(event):     # finished spans; those of one track are in order and never overlap
            ...
    for span in reader.open():              # spans still in progress

| lane          | track          | value   | from                                                                     |
|---------------|----------------|---------|--------------------------------------------------------------------------|
| an engine     | `serves`       | version | one publication to the next, or to the engine's loss; −1 before the first|
|               | `pause`        | version | measured by the engine; drawn at the end of the publication              |
|               | `away`         | –       | `engine_suspect` to `engine_back`, or lost to rejoined; note: the reason;|
|               |                |         | an engine that left as planned is not away                               |
| `trainer`     | `step`, `wait` | step    | measured by the trainer; the note of a wait is its cause                 |
|               | `publish_wait` | step    | time blocked by a publication; measured, drawn at the end of the step    |
| `publication` | `publish`      | version | measured by the trainer                                                  |
| `evaluation`  | `evaluation`   | version | `evaluation_began` to its result; the note says why it was restarted     |
| `checkpoint`  | `checkpoint`   | step    | from its step until it is durable                                        |
|               | `stall`        | step    | training was stopped for it; measured, drawn at the beginning            |

Times are seconds since the run began, without periods in which the run was not running. If the log's writer was killed
and the run resumed, another `run_started` follows; open spans then end with the last event before it.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from pipelinerl.observability.events import ENDS, Event, amount, changes_words, kind_of

#: Maximum numbers of groups without a known step, and of orders without known stages; the oldest are dropped.
_PENDING: Final = 1024
_ORDERS: Final = 1 << 14

_Stages = tuple[int, float, float, float, str, list[tuple[int, int]]]


class TracedGroup(NamedTuple):
    """The times at which the stages of one group ended, in seconds since the run began.

    For some groups, chosen by seed, actors report when each stage ended (`ActorAlive.stages`). The controller adds a
    few of these reports to the next `step` event, with times in Unix seconds; `order` is the number of the group:

        "stages": [[order, claimed, sampled, verified, engine, [[version, tokens], …]], …]

    `order` numbers the request to sample the group, and `claimed` is when an actor took this request. `trained` is when
    the trainer began to compute the group's step, `ended` when that step was complete. `spans` are the runs of tokens
    in the group's longest answer that one version sampled, as (version, number of tokens).
    """

    order: int
    step: int
    engine: str
    claimed: float
    sampled: float
    verified: float
    trained: float
    ended: float
    spans: tuple[tuple[int, int], ...] = ()


TRAINER: Final = "trainer"
PUBLICATION: Final = "publication"
EVALUATION: Final = "evaluation"
CHECKPOINT: Final = "checkpoint"
#: The kind of all engines' lanes; the name of such a lane is the engine's URL.
ENGINE: Final = "engine"

#: Cause of a wait, if no other cause explains at least half of the wait.
SAMPLING: Final = "sampling"
_EXPLAINS: Final = 0.5
#: Number of recent steps that are kept to find when a checkpoint began, and of recent evaluations and verifications
#: that are kept to explain waits.
_REMEMBERED: Final = 64


class Span(NamedTuple):
    """One activity of one part of the run, from `start` to `end` in seconds."""

    lane: str
    track: str
    start: float
    end: float
    value: int
    note: str = ""


class RunMark(NamedTuple):
    """An event without a duration, such as an alarm, described in words."""

    at: float
    kind: str
    words: str


Drawn = Span | RunMark | TracedGroup


class _Begun(NamedTuple):
    start: float
    value: int
    note: str = ""


@dataclass(slots=True)
class SpanReader:
    """Reader of one run's events in log order; memory is bounded for any length of run."""

    now: float = 0.0
    """Time of the newest event, in seconds since the run began."""
    _serves: dict[str, _Begun] = field(default_factory=dict)
    _away: dict[str, _Begun] = field(default_factory=dict)
    _served: dict[str, int] = field(default_factory=dict)  # versions of suspect engines
    _engineless: _Begun | None = None
    _evaluation: _Begun | None = None
    # By lane and track, the time at which the last span ends.
    _ends: dict[tuple[str, str], float] = field(default_factory=dict)
    _steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _held: deque[tuple[float, float, str]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    # Groups whose step is not known yet; and by order, the step that trained it, its beginning and its end.
    _waiting: OrderedDict[int, TracedGroup] = field(default_factory=OrderedDict)
    _trained: OrderedDict[int, tuple[int, float, float]] = field(default_factory=OrderedDict)

    def read(self, event: Event) -> Iterator[Drawn]:
        """Yield the spans and groups that end with this event, and a `RunMark` if the event itself is to be shown."""
        kind, before = kind_of(event), self.now
        self.now = max(self.now, amount(event, "elapsed_s"))  # time never decreases, even if the clock is set back
        if kind == "run_started":
            yield from self._cut(before)
        if kind == "knobs":
            yield RunMark(self.now, kind, f"{changes_words(event.get('changes'))} by {event.get('who', 'unknown')}")
        elif kind in _WORDS:
            yield RunMark(self.now, kind, _WORDS[kind].format_map(defaultdict(str, event)))
        if kind in ENDS:
            yield from self._cut(self.now)
        elif kind == "evaluation_began":
            self._evaluation = _Begun(self.now, _whole(event, "model_version"))
        elif kind in _READINGS:
            yield from _READINGS[kind](self, event)

    def open(self) -> Iterator[Span]:
        """Yield spans that are still in progress, up to now."""
        for url, begun in self._serves.items():
            yield Span(url, "serves", begun.start, self.now, begun.value, begun.note)
        for url, begun in self._away.items():
            yield Span(url, "away", begun.start, self.now, begun.value, begun.note)
        if self._evaluation is not None:
            yield Span(EVALUATION, "evaluation", self._evaluation.start, self.now, *self._evaluation[1:])

    # --- readings of one kind --------------------------------------------------------------------------------------

    def _step(self, event: Event) -> Iterator[Drawn]:
        step, step_s, wait_s = _whole(event, "step"), amount(event, "step_s"), amount(event, "wait_s")
        began = self.now - step_s
        groups = list(self._joined_groups(event, step, began))
        for group in groups:
            self._held.append((group.sampled, group.verified, "verification"))
        if wait_s > 0:
            yield from self._span(TRAINER, "wait", began - wait_s, began, step, self._culprit(began - wait_s, began))
        yield from self._span(TRAINER, "step", began, self.now, step)
        if (held_s := min(step_s, amount(event, "publish_wait_s"))) > 0:
            yield from self._span(TRAINER, "publish_wait", self.now - held_s, self.now, step)
        self._steps.append((step, self.now))
        yield from groups

    def _joined_groups(self, event: Event, step: int, began: float) -> Iterator[TracedGroup]:
        """Yield each traced group of which both the stages and the step are known now, whichever came first."""
        for order in _entries(event, "orders"):
            if isinstance(order, int):
                self._trained[order] = (step, began, self.now)
        run_began_at = amount(event, "time") - self.now
        for stages in _entries(event, "stages"):
            with suppress(msgspec.ValidationError):
                order, *ended, engine, spans = msgspec.convert(stages, _Stages)
                claimed, sampled, verified = (max(0.0, at - run_began_at) for at in ended)
                self._waiting[order] = TracedGroup(order, 0, engine, claimed, sampled, verified, 0.0, 0.0, tuple(spans))
        for order in [order for order in self._waiting if order in self._trained]:
            step, trained, end = self._trained[order]
            group = self._waiting.pop(order)
            # The stages may have been measured by another machine's clock, so end each no later than the next one.
            verified = min(group.verified, trained)
            sampled = min(group.sampled, verified)
            claimed = min(group.claimed, sampled)
            yield TracedGroup(order, step, group.engine, claimed, sampled, verified, trained, end, group.spans)
        for held, most in ((self._waiting, _PENDING), (self._trained, _ORDERS)):
            while len(held) > most:
                held.popitem(last=False)

    def _publish(self, event: Event) -> Iterator[Drawn]:
        version = _whole(event, "model_version")
        yield from self._span(PUBLICATION, "publish", self.now - amount(event, "total_s"), self.now, version)
        pauses = event.get("pauses_s")
        if not isinstance(pauses, Mapping):  # an old log has no pauses per engine; assume that all engines were updated
            pauses = dict.fromkeys(self._serves, amount(event, "pause_s"))
        for url in pauses:
            yield from self._span(url, "pause", self.now - amount(pauses, url), self.now, version)
            yield from self._now_serves(str(url), version)

    def _now_serves(self, url: str, version: int) -> Iterator[Span]:
        begun = self._serves.get(url)
        if begun is None or begun.value != version:
            yield from self._ended_serving(url)
            self._serves[url] = _Begun(self.now, version)

    def _ended_serving(self, url: str) -> Iterator[Span]:
        if (begun := self._serves.pop(url, None)) is not None:
            yield from self._span(url, "serves", begun.start, self.now, begun.value, begun.note)

    def _joined(self, event: Event) -> Iterator[Drawn]:
        url = str(event.get("url"))
        yield from self._back(event)
        self._serves.setdefault(url, _Begun(self.now, -1, "no weights of this run yet"))
        if self._engineless is not None:
            self._held.append((self._engineless.start, self.now, "engines"))
            self._engineless = None

    def _lost(self, event: Event) -> Iterator[Drawn]:
        yield from self._left(event)
        self._away[str(event.get("url"))] = _Begun(self.now, -1, f"lost: {event.get('reason', '')}")

    def _left(self, event: Event) -> Iterator[Drawn]:
        yield from self._back(event)
        yield from self._ended_serving(str(event.get("url")))
        if not self._serves and self._engineless is None:
            self._engineless = _Begun(self.now, -1)

    def _suspect(self, event: Event) -> Iterator[Drawn]:
        url = str(event.get("url"))
        self._away.setdefault(url, _Begun(self.now, -1, "no answer"))
        if (served := self._serves.get(url)) is not None:
            yield from self._ended_serving(url)
            self._served[url] = served.value

    def _back(self, event: Event) -> Iterator[Drawn]:
        url = str(event.get("url"))
        if (begun := self._away.pop(url, None)) is not None:
            yield from self._span(url, "away", begun.start, self.now, begun.value, begun.note)
        if (version := self._served.pop(url, None)) is not None and event["kind"] == "engine_back":
            yield from self._now_serves(url, version)

    def _evaluated(self, event: Event) -> Iterator[Drawn]:
        # Each evaluation set has its own event; the first event ends the span.
        if (begun := self._evaluation) is not None:
            self._evaluation = None
            self._held.append((begun.start, self.now, EVALUATION))
            note = str(event.get("reason") or event.get("name") or "")
            yield from self._span(EVALUATION, "evaluation", begun.start, self.now, begun.value, note)

    def _checkpointed(self, event: Event) -> Iterator[Drawn]:
        version, stall_s = _whole(event, "model_version"), amount(event, "stall_s")
        began = next((at for step, at in reversed(self._steps) if step == version), self.now - stall_s)
        yield from self._span(CHECKPOINT, "stall", began, min(self.now, began + stall_s), version)
        yield from self._span(CHECKPOINT, "checkpoint", began, self.now, version)

    def _cut(self, at: float) -> Iterator[Drawn]:
        now, self.now = self.now, at
        for span in list(self.open()):
            yield from self._span(*span)
        self.now = now
        self._serves, self._away, self._served, self._evaluation, self._engineless = {}, {}, {}, None, None

    # --- details ---------------------------------------------------------------------------------------------------

    def _span(self, lane: str, track: str, start: float, end: float, value: int, note: str = "") -> Iterator[Span]:
        """Yield a span, trimmed to start after the track's last span, as clocks may differ; none if no time is left."""
        start = max(0.0, start, self._ends.get((lane, track), 0.0))
        if end > start:
            self._ends[lane, track] = end
            yield Span(lane, track, start, end, value, note)

    def _culprit(self, start: float, end: float) -> str:
        """Return the cause that overlaps the wait [start, end] most, or `SAMPLING` if no cause covers half of it."""
        known = [each for each in self._held if each[1] > start and each[0] < end]
        known += [(each.start, end, EVALUATION) for each in (self._evaluation,) if each is not None]
        known += [(each.start, end, "engines") for each in (self._engineless,) if each is not None]
        best, culprit = _EXPLAINS * (end - start), SAMPLING
        for cause in dict.fromkeys(name for _, _, name in known):
            overlaps = [(max(start, since), min(end, until)) for since, until, name in known if name == cause]
            if (covered := _covered(overlaps)) > best:
                best, culprit = covered, cause
        return culprit


#: Templates for the texts of marks, by kind of event; fields that an event lacks become empty.
_WORDS: Final[Mapping[str, str]] = {
    "alarm": "{what}",
    "alarm_cleared": "alarm over: {alarm} {domain}",
    "stalled": "no progress: waiting for {waits_for}",
    "run_started": "the run started or resumed",
    "controller_returned": "the controller came back at v{model_version}",
    "trainer_ready": "a trainer started at v{model_version}, epoch {epoch}",
    "trainer_left": "the trainer left at v{model_version}",
    "engine_joined": "{url} joined",
    "engine_lost": "{url} was lost: {reason}",
    "engine_left": "{url} left: {reason}",
    "engine_slow": "{url} has {speed} of the fleet's speed",
    "engine_draining": "{url} is draining",
    "parameter_server_lost": "parameter server {url} of shard {shard} was lost: {reason}",
    "parameter_server_back": "parameter server {url} of shard {shard} is back",
    "engines_scaled": "{from} → {to} {type} engines: {why}",
    "engines_would_scale": "{from} → {to} {type} engines, but for the dry run: {why}",
    "step_skipped": "step {step} was skipped: {what} not finite",
    "checkpoint_delayed": "no checkpoint of step {model_version} yet: {reason}",
    "run_finished": "{reason}",
    "run_failed": "{reason}",
    "run_suspended": "{reason}",
}


_READINGS: Final = {
    "step": SpanReader._step,
    "publish": SpanReader._publish,
    "engine_joined": SpanReader._joined,
    "engine_back": SpanReader._back,
    "engine_suspect": SpanReader._suspect,
    "engine_lost": SpanReader._lost,
    "engine_left": SpanReader._left,
    "evaluation": SpanReader._evaluated,
    "evaluation_restarted": SpanReader._evaluated,
    "checkpoint": SpanReader._checkpointed,
}


def _covered(intervals: list[tuple[float, float]]) -> float:
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _entries(event: Event, field: str) -> Sequence[Any]:
    value = event.get(field)
    return value if isinstance(value, list | tuple) else ()


def _whole(event: Event, field: str) -> int:
    return int(amount(event, field))
