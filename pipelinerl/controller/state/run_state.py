"""`RunState`: all that the controller knows, as one value that can be written down and read back whole.

Two records are taken of it. The journal keeps the whole, for a controller that dies while its run goes on. A checkpoint
keeps what outlives everything else (`checkpoint_record`), for a run that is started again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any, Final, Self, final

import msgspec

from pipelinerl.controller.state.cooldown import Cooldown
from pipelinerl.controller.state.elastic import ElasticMemory
from pipelinerl.controller.state.evaluation import Evaluation, EvaluationDue, EvaluationResult
from pipelinerl.controller.state.filtered_share import FilteredShare
from pipelinerl.controller.state.fleet import Fleet
from pipelinerl.controller.state.issued_ledger import IssuedLedger
from pipelinerl.controller.state.knobs import KnobChange, Knobs
from pipelinerl.controller.state.watched_steps import WatchedSteps
from pipelinerl.messages import ActorAlive, ConsumedReport, Directive, Published, TrainerReady
from pipelinerl.types import Problem, Quota

#: Who has not been heard of for so long may be gone. A trainer that waits says so every few seconds; an actor's heart
#: beats more often still.
SILENT_S: Final = 15.0


#: The place of an evaluation set that the recipe has no longer: behind all others.
NOWHERE: Final = 2**16


class RunPhase(StrEnum):
    """Where the run stands."""

    STARTING = "starting"
    TRAINING = "training"
    FINISHING = "finishing"
    FINISHED = "finished"


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that an operator wants to be started, and whether it is still wanted.

    With `replaces` (a URL), that one is drained once this one serves; it is cleared as soon as that has been seen to.
    """

    name: str
    type: str
    replaces: str = ""
    grace_s: float = 0.0
    wanted: bool = True


class PublicationOrdered(msgspec.Struct, kw_only=True):
    """A publication that the trainer was directed to make."""

    directive: str
    """The name of that directive."""
    version: int
    """The oldest weights that it may bring: those of when it was directed, or of a step that was done before it."""
    membership: int
    recipients: list[str]
    reported: bool = False

    @classmethod
    def of(cls, directive: Directive, version: int) -> Self:
        """The publication of a directive that was made at `version`."""
        return cls(
            directive=directive.answers,
            version=version,
            membership=directive.membership,
            recipients=directive.publish_to,
        )

    def reaches(self, url: str, *, joined_at: int) -> bool:
        """Whether it goes to the engine that joined with that membership."""
        return url in self.recipients and joined_at <= self.membership


class TrainerRecord(msgspec.Struct, kw_only=True):
    """What the controller knows of the trainer of this epoch, and what it has told it."""

    heard: tuple[str, float] | None = None
    """Kind of its last report, and when that came."""
    pending_ready: TrainerReady | None = None
    """Its question what to do, while engines that are expected have not joined."""
    awaited: list[str] = []
    """Names of those engines."""
    begun: list[str] = []
    """The reports with which an epoch has begun, of any trainer; none begins another."""
    answers: dict[str, Directive] = {}
    """The last directive by the report that it answers, since a report may be repeated."""
    publications: list[PublicationOrdered] = []
    """Those it was directed to make and has not reported, in that order; before them the last that it has reported."""
    stop_sent: bool = False
    """Was it told to stop?"""
    first_version: int = 0
    """Where it began to train."""
    training_since: float = 0.0
    """When it began to train, for the estimate of the end."""
    stepped: ConsumedReport = ConsumedReport()
    """Its account as of the last step (or of its start): what ended since then was not trained."""
    last_step: dict[str, float] = {}
    """Figures of its last step."""
    last_publish: Published | None = None
    """Its last publication."""
    unsaved: str = ""
    """Why a checkpoint cannot be written yet, in words; training waits once the next one is due."""

    @property
    def publishes(self) -> bool:
        """Whether a publication is under way, or will be."""
        return any(not each.reported for each in self.publications)

    def note_step(self, version: int) -> None:
        """Weights change only between publications: what has not been reported brings those of this step."""
        for each in self.publications:
            each.version = each.version if each.reported else version

    def note_published(self, report: Published) -> None:
        """Publications end in order, so those before the reported one have ended, too."""
        self.last_publish = report
        names = [each.directive for each in self.publications if not each.reported]
        if report.directive in names:
            waiting = [each for each in self.publications if not each.reported][names.index(report.directive) :]
            waiting[0].reported = True
            self.publications = waiting


class Evaluations(msgspec.Struct, kw_only=True):
    """The evaluations of a run."""

    current: Evaluation | None = None
    """The one under way."""
    begun: int = 0
    """How many were begun, anew or not: the number of the last."""
    due: EvaluationDue | None = None
    """One that waits for weights to be served, or for the current one to end."""
    results: list[EvaluationResult] = []
    """Those that have ended, the oldest first; only the last of each set has figures by domain and tag."""

    def add(self, result: EvaluationResult) -> None:
        """One has ended."""
        of_it = [number for number, before in enumerate(self.results) if before.name == result.name]
        if of_it:
            self.results[of_it[-1]] = self.results[of_it[-1]].without_groups
        self.results.append(result)

    def follow(self, places: Mapping[str, int]) -> None:
        """The recipe has its sets in these places now, which may be others than before; one that is gone has none."""
        self.results = [replace(each, place=places.get(each.name, NOWHERE)) for each in self.results]


class Failing(msgspec.Struct, kw_only=True):
    """Why the run cannot go on, and what may come to that; `giving_up.py` decides."""

    reason: str = ""
    """Why it cannot, or is not to; empty while it does."""
    hopeless: bool = False
    """Does the run end because no answer is ever right? It then ends as any other, and exits with status 1."""
    suspends: bool = False
    """Has somebody asked for its end now, to go on with it another time?"""
    since: float = 0.0
    """When that became known."""
    engineless_since: float = 0.0
    """When the last engine went, or the run began without one; 0 while one is alive."""
    refused_groups: int = 0
    """Groups in a row whose prompts were refused for good."""
    refused_reason: str = ""
    """Why the last of them was."""
    too_long_groups: int = 0
    """Groups since the last step whose prompts leave no room in the context."""
    too_long_reason: str = ""
    """What was said of the last of them."""


class Watchdog(msgspec.Struct, kw_only=True):
    """Whether anything gets on; `stall_diagnosis.py` says what does not."""

    mark: tuple[Any, ...] = ()
    """The last `progress_mark`."""
    moved_at: float = 0.0
    """When it changed; 0 before the first decision."""
    reported: bool = False
    """Was it reported that it has not changed since?"""


@final
class RunState(msgspec.Struct, kw_only=True):
    """State of a run; changed by `Controller` alone."""

    launch: str = ""
    """Tells the launch of the run that this state is of from others; empty where roles are started by hand."""
    phase: RunPhase = RunPhase.STARTING
    epoch: int = 0
    """The number of the trainer: how many have begun."""
    version: int = 0
    """The newest version of the weights."""
    stop_reason: str | None = None
    """Why the run is to end before its last step."""
    knobs: Knobs
    """Their values now."""
    knob_log: list[KnobChange] = []
    """Every change of them, the oldest first."""
    first_domain_weights: dict[str, float]
    """Those that the recipe gives."""
    quotas: list[Quota] = []
    """Within how many orders the domains' shares are kept, the oldest first; a knob may change what a step takes."""
    loaded_from: list[tuple[int, int]] = []
    """(order, version): from that order on, no engine held older weights when it was issued; the oldest first."""
    filtered_share: FilteredShare = msgspec.field(default_factory=FilteredShare)
    """Which part of the orders trains nothing, as the last steps have shown it."""
    cooldown: Cooldown = msgspec.field(default_factory=Cooldown)
    """Problems that were solved of late, and are passed over."""
    fleet: Fleet = msgspec.field(default_factory=Fleet)
    engine_requests: list[EngineRequest] = []
    """Engines beyond the recipe's, in the order of asking; a resumed run begins without."""
    elastic: ElasticMemory = msgspec.field(default_factory=ElasticMemory)
    """What speaks for more engines, or for fewer."""
    account: IssuedLedger = msgspec.field(default_factory=IssuedLedger)
    """Prompt orders by what became of them."""
    resumed_account: dict[str, Any] | None = None
    """The account of a checkpoint, until the trainer's own arrives."""
    actors: dict[str, tuple[ActorAlive, float]] = {}
    """Each actor's last heartbeat, and when it came."""
    trainer: TrainerRecord = msgspec.field(default_factory=TrainerRecord)
    evaluations: Evaluations = msgspec.field(default_factory=Evaluations)
    failing: Failing = msgspec.field(default_factory=Failing)
    watchdog: Watchdog = msgspec.field(default_factory=Watchdog)
    watched: WatchedSteps = msgspec.field(default_factory=WatchedSteps)

    def live_actors(self, now: float) -> list[ActorAlive]:
        """What each actor said last that has been heard of late."""
        return [alive for alive, heard in self.actors.values() if now - heard <= SILENT_S]

    def domain_weights_of(self, index: int) -> dict[str, float]:
        """The weights by which order `index` is drawn, however often it is issued: those of when it was first."""
        for change in reversed(self.knob_log):
            if change.cursor <= index and "domain_weights" in change.changes:
                return self._drawable(change.changes["domain_weights"])
        return self._drawable(self.first_domain_weights)

    def follow_groups_per_step(self) -> None:
        """From the next order that was never issued on, shares are kept within as many as a step takes now."""
        if not self.quotas or self.quotas[-1].size != self.knobs.groups_per_step:
            since = self.account.cursor if self.quotas else 0
            self.quotas = [quota for quota in self.quotas if quota.since < since]
            self.quotas.append(Quota(since, self.knobs.groups_per_step))

    def follow_loaded(self, loaded: int) -> None:
        """Orders that are issued from now on are sampled by these weights or newer ones; what has ended is forgotten.

        Without a record, of a trainer that begins, whatever is out is issued again now.
        """
        if not self.loaded_from or self.loaded_from[-1][1] != loaded:
            since = self.account.cursor if self.loaded_from else 0
            self.loaded_from = [*(each for each in self.loaded_from if each[0] < since), (since, loaded)]
        frontier = self.account.consumed.frontier
        while len(self.loaded_from) > 1 and self.loaded_from[1][0] <= frontier:
            self.loaded_from = self.loaded_from[1:]

    def quota_of(self, index: int) -> Quota:
        """The quota by which order `index` is apportioned, however often it is issued: that of when it was first."""
        return next(quota for quota in reversed(self.quotas) if quota.since <= index)

    def choose_problem(self, index: int, draw: Callable[[int], Problem]) -> Problem:
        """The problem of order `index`; `draw` as `Cooldown.choose` has it."""
        return self.cooldown.choose(index, draw, version=self.version, frontier=self.account.consumed.frontier)

    def _drawable(self, weights: dict[str, float]) -> dict[str, float]:
        """Weights of the domains that there are: a recipe edited since may have others."""
        return {domain: weights.get(domain, 0.0) for domain in self.knobs.domain_weights}

    def checkpoint_record(self) -> dict[str, Any]:
        """What a checkpoint must carry of the controller, as plain values."""
        return {
            "epoch": self.epoch,
            "account": self.account.to_record(),
            "knobs": self.knobs.to_json(),
            "first_domain_weights": self.first_domain_weights,
            "filtered_share": msgspec.to_builtins(self.filtered_share),
            "cooldown": msgspec.to_builtins(self.cooldown),
            "quotas": [list(quota) for quota in self.quotas],
            "knob_log": [msgspec.to_builtins(change) for change in self.knob_log],
            "evaluations": [msgspec.to_builtins(result) for result in self.evaluations.results],
        }

    def resume(self, record: Mapping[str, Any], *, step: int) -> None:
        """Continue from a `checkpoint_record` of `step`; the trainer's own account arrives with its `TrainerReady`.

        The knobs are the recipe's, which may have been edited, but for what was changed live. Orders that are issued
        again keep the mixture by which they were drawn.

        Raises:
            RecipeError: the recipe's knobs and those changed live cannot run together.
        """
        self.epoch = int(record["epoch"])
        before, recipe = record["knobs"], self.knobs
        self.knob_log = [KnobChange(**change) for change in record["knob_log"]]
        self.first_domain_weights = record.get("first_domain_weights", self.first_domain_weights)
        self.filtered_share = msgspec.convert(record.get("filtered_share", {}), FilteredShare)
        self.cooldown = msgspec.convert(record.get("cooldown", {}), Cooldown)
        self.quotas = [Quota(*quota) for quota in record.get("quotas", ())]
        self.knobs = recipe.with_live(self.knob_log)
        edited = {name: value for name, value in self.knobs.to_json().items() if value != before.get(name)}
        if edited:
            change = KnobChange(
                time=max((change.time for change in self.knob_log), default=0.0),
                step=step,
                cursor=int(record["account"]["cursor"]),
                who="the edited recipe",
                changes=edited,
                live=False,
            )
            self.knob_log.append(change)
        self.evaluations.results = msgspec.convert(record["evaluations"], list[EvaluationResult])
        self.resumed_account = dict(record["account"])
