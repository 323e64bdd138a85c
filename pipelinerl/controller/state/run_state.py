"""`RunState`: everything the controller knows, as one value that can be stored and restored.

The state is stored in two ways. The journal keeps the whole state, for a controller that dies while its run continues.
A checkpoint keeps the part that is still valid after all processes have ended (`checkpoint_record`), for a resumed run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, Self

import msgspec

from pipelinerl.config.learning import CooldownSection
from pipelinerl.config.sections import ElasticSection, RunSection
from pipelinerl.controller.state.cooldown import Cooldown
from pipelinerl.controller.state.evaluation import Evaluation, EvaluationDue, EvaluationPlan, EvaluationResult
from pipelinerl.controller.state.fleet import Fleet
from pipelinerl.controller.state.issued_ledger import FilteredShare, IssuedLedger
from pipelinerl.controller.state.knobs import KnobChange, Knobs
from pipelinerl.controller.state.lag import LagRule
from pipelinerl.controller.state.reward_history import RewardHistory
from pipelinerl.enums import NoSignal, Overdue, StalenessScope
from pipelinerl.messages import (
    ActorAlive,
    ConsumedReport,
    Directive,
    GroupStages,
    Published,
    TrainerReady,
    VerifierFigures,
)
from pipelinerl.staleness import StalenessBounds
from pipelinerl.types import DomainSampling, Quota, Sampling


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one interval for automatic scaling, as shares (0 to 1); `ElasticSection` has the thresholds."""

    waiting: float
    occupancy: float
    stale: float


class ElasticMemory(msgspec.Struct, kw_only=True):
    """State of automatic scaling: measurements of this interval, and how many intervals suggested the same change."""

    began: float | None = None
    """Start of the current interval; None before the first poll and after a change."""
    occupancy: float = 0.0
    """Sum of the shares of occupied slots that were measured by `polls` polls."""
    polls: int = 0
    waited_s: float = 0.0
    """Time that the trainer waited for rollouts in the `steps` steps of this interval; `stepped_s`: time it worked."""
    stepped_s: float = 0.0
    groups: float = 0.0
    """Groups that ended in the steps of this interval; `late` of them were too old to be trained."""
    late: float = 0.0
    steps: int = 0
    streak: int = 0
    """Consecutive intervals that call for more engines; negative if they call for fewer."""
    changed: float | None = None
    """Time of the last change in the number of engines, or of a dry run's last suggestion."""

    def note_poll(self, occupancy: float, *, now: float) -> None:
        """Add a poll's result: the share of occupied slots of the serving engines (0 to 1)."""
        self.began = now if self.began is None else self.began
        self.occupancy += occupancy
        self.polls += 1

    def end_interval(self, *, now: float, interval_s: float) -> Figures | None:
        """Return the interval's measurements and begin a new one; None if it has not ended, or no step ended in it."""
        if self.began is None or now - self.began < interval_s or not self.steps or not self.polls:
            return None
        seconds = self.waited_s + self.stepped_s
        figures = Figures(
            waiting=self.waited_s / seconds if seconds > 0 else 0.0,
            occupancy=self.occupancy / self.polls,
            stale=self.late / self.groups if self.groups else 0.0,
        )
        self.forget()
        return figures

    def forget(self) -> None:
        """Reset the measurements; the next interval begins with the next poll."""
        self.began, self.occupancy, self.polls = None, 0.0, 0
        self.waited_s, self.stepped_s, self.groups, self.late, self.steps = 0.0, 0.0, 0.0, 0.0, 0


#: A process that was silent for this many seconds may be gone. A waiting trainer reports every few seconds, and actors
#: send heartbeats more often.
SILENT_S: Final = 15.0


#: The position of an evaluation set that is no longer in the recipe: after all other sets.
NOWHERE: Final = 2**16


class RunPhase(StrEnum):
    """Phase of a run: starting, training, finishing (last evaluation) or finished."""

    STARTING = "starting"
    TRAINING = "training"
    FINISHING = "finishing"
    FINISHED = "finished"


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that an operator requested; `wanted` is False once the request is withdrawn.

    With `replaces` (a URL), the engine at this URL is drained once the new engine serves; then `replaces` is cleared.
    """

    name: str
    type: str
    replaces: str = ""
    grace_s: float = 0.0
    wanted: bool = True


class PublicationOrdered(msgspec.Struct, kw_only=True):
    """A publication that the trainer was directed to make."""

    directive: str
    version: int
    """The oldest version that the publication may contain: the newest version when it was ordered.

    Each step that ends before the publication is reported raises this version.
    """
    membership: int
    recipients: list[str]
    reported: bool = False

    @classmethod
    def of(cls, directive: Directive, version: int) -> Self:
        """Return a record of the publication that `directive` orders when the trainer is at `version`."""
        return cls(
            directive=directive.answers,
            version=version,
            membership=directive.membership,
            recipients=directive.publish_to,
        )


class TrainerRecord(msgspec.Struct, kw_only=True):
    """The controller's record of the current trainer process (epoch): its reports, and the directives sent to it."""

    last_report: tuple[str, float] | None = None
    """Kind and arrival time of the trainer's last report."""
    pending_ready: TrainerReady | None = None
    """The trainer's ready report, which stays unanswered until the expected engines have joined."""
    awaited: list[str] = []
    """Names of the expected engines that have not joined."""
    begun: list[str] = []
    """Ids of all trainers' ready reports that have begun an epoch; a repeated report must not begin a second one."""
    answers: dict[str, Directive] = {}
    """The directive that answered the newest report, by the report's id, since the report may be repeated."""
    publications: list[PublicationOrdered] = []
    """The last reported publication, followed by the publications that are ordered and not yet reported, in order."""
    stop_sent: bool = False
    first_version: int = 0
    """The model version at which the trainer began to train."""
    training_since: float = 0.0
    """Time when the trainer began to train; used to estimate the end of the run."""
    stepped: ConsumedReport = ConsumedReport()
    """The trainer's counts of ended orders at its last step, or at its start: orders that ended later are untrained."""
    last_step: dict[str, float] = {}
    last_publish: Published | None = None
    unsaved: str = ""
    """The reason why a checkpoint is delayed; training waits once the next checkpoint is due."""

    def note_step(self, version: int) -> None:
        """Record that a step made `version`: publications not reported yet will send these weights or newer ones."""
        # Weights do not change during a publication, so a publication that is still unreported after a step has the
        # weights of this step or of a later one.
        for each in self.publications:
            each.version = each.version if each.reported else version

    def note_published(self, report: Published) -> None:
        """Record that a publication was reported. Publications are made in order, so earlier ones have ended, too."""
        self.last_publish = report
        names = [each.directive for each in self.publications if not each.reported]
        if report.directive in names:
            waiting = [each for each in self.publications if not each.reported][names.index(report.directive) :]
            waiting[0].reported = True
            self.publications = waiting


class Evaluations(msgspec.Struct, kw_only=True):
    """The current evaluation of a run, the evaluation that waits to begin, and the results so far."""

    current: Evaluation | None = None
    begun: int = 0
    """Number of evaluations begun, including restarts; also the `number` of the latest evaluation."""
    due: EvaluationDue | None = None
    """A pending evaluation, waiting for its weights to be served or for the current evaluation to end."""
    results: list[EvaluationResult] = []
    """Results, oldest first; only the latest of each set has figures by domain and tag."""

    def add(self, result: EvaluationResult) -> None:
        """Add a result; of each set, only the newest keeps its metrics by domain and tag, to save memory."""
        self.results = [replace(r, by_domain={}, by_tag={}) if r.name == result.name else r for r in self.results]
        self.results.append(result)

    def follow(self, places: Mapping[str, int]) -> None:
        """Update `place`, the position of each result's set in the edited recipe; sets that it lacks get `NOWHERE`."""
        self.results = [replace(each, place=places.get(each.name, NOWHERE)) for each in self.results]


class Failing(msgspec.Struct, kw_only=True):
    """The reason why the run cannot continue, if any, and counts of failures from which `giving_up.py` derives it."""

    reason: str = ""
    """The reason for ending the run; empty while it continues."""
    hopeless: bool = False
    """True if the run ends for lack of signal without being solved. It ends normally, but exits with status 1."""
    suspends: bool = False
    since: float = 0.0
    engineless_since: float = 0.0
    """Time when the last engine was lost, or the run began without engines; 0 while an engine is alive."""
    refused_groups: int = 0
    """Consecutive groups whose prompts were permanently rejected."""
    refused_reason: str = ""
    too_long_groups: int = 0
    """Groups since the last step whose prompts leave no room for an answer in the context."""
    too_long_reason: str = ""


class Watchdog(msgspec.Struct, kw_only=True):
    """Tracks whether the run makes progress; `giving_up.py` names the cause of a stall."""

    mark: tuple[Any, ...] = ()
    moved_at: float = 0.0
    """Time when `progress_mark` last changed; 0 before the first decision."""
    reported: bool = False


class AlarmClock(msgspec.Struct, frozen=True, kw_only=True):
    """How often in a row an alarm's condition has held, or else the time and step since which it does not hold."""

    held: int = 0
    calm_since: float | None = None
    calm_step: int = 0


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """Numbers of answers, and of their tokens."""

    answers: float = 0.0
    tokens: float = 0.0


class WatchedSteps(msgspec.Struct, kw_only=True):
    """Metrics of the newest step by domain and tag, data for the next step's metrics, and data for alarms."""

    by_domain: dict[str, dict[str, float]] = {}
    by_tag: dict[str, dict[str, float]] = {}
    verified: dict[str, VerifierFigures] = {}
    """By domain, cumulative figures of the actors' verifiers as of the last step."""
    outdated: dict[str, int] = {}
    """By domain, the number of groups that actors have given up as stale since the last step."""
    stale: Sampled = Sampled()
    """Answers that the trainer has dropped as stale since its start, as of the last step."""
    recent: list[WatchedStep] = []
    """The last `WINDOW` steps, oldest first."""
    rewards: RewardHistory = msgspec.field(default_factory=RewardHistory)
    """Training rewards since the run began or was resumed, for the collapse guard."""
    first_entropies: list[float] = []
    """Entropies of the first `FIRST_STEPS` steps after the run began or was resumed, for the entropy alarm."""
    stages: list[GroupStages] = []
    """Stage timings of a few groups that ended since the last step, for the next step's event."""
    alarms: dict[str, str] = {}
    """Messages of active alarms, by key."""
    alarm_clocks: dict[str, AlarmClock] = {}
    """By key, for how long the conditions of active and coming alarms have held or not held."""


class Rewind(msgspec.Struct, kw_only=True):
    """The run's only return to an earlier checkpoint, after a collapse; `to` is its version while under way."""

    done: bool = False
    to: int | None = None
    decided_at: int = 0


class RunState(msgspec.Struct, kw_only=True):
    """The state of a run; only `Controller` changes it."""

    launch: str = ""
    """Identifies the launch that this state belongs to; empty if processes are started manually."""
    phase: RunPhase = RunPhase.STARTING
    epoch: int = 0
    """Number that identifies the current trainer process; each trainer that begins gets a higher one."""
    version: int = 0
    """The newest version of the weights."""
    stop_reason: str | None = None
    """The reason for ending the run before its last step."""
    knobs: Knobs
    knob_log: list[KnobChange] = []
    """All knob changes, oldest first."""
    first_domain_weights: dict[str, float]
    quotas: list[Quota] = []
    """Sizes of the blocks of orders within which domain shares are exact, each with its first order; oldest first."""
    loaded_from: list[tuple[int, int]] = []
    """(order, version), oldest first: when orders from `order` on were issued, engines had `version` or newer."""
    filtered_share: FilteredShare = msgspec.field(default_factory=FilteredShare)
    lag: LagRule = msgspec.field(default_factory=LagRule)
    cooldown: Cooldown = msgspec.field(default_factory=Cooldown)
    fleet: Fleet = msgspec.field(default_factory=Fleet)
    engine_requests: list[EngineRequest] = []
    """Engines requested beyond the recipe's, in order of request; a resumed run begins with none."""
    elastic: ElasticMemory = msgspec.field(default_factory=ElasticMemory)
    account: IssuedLedger = msgspec.field(default_factory=IssuedLedger)
    resumed_account: dict[str, Any] | None = None
    """The ledger of orders from a checkpoint, until the trainer reports its own counts."""
    resumed_step: int = 0
    """The step of the checkpoint from which the run continues."""
    actors: dict[str, tuple[ActorAlive, float]] = {}
    """Each actor's last heartbeat, with its arrival time."""
    trainer: TrainerRecord = msgspec.field(default_factory=TrainerRecord)
    evaluations: Evaluations = msgspec.field(default_factory=Evaluations)
    failing: Failing = msgspec.field(default_factory=Failing)
    watchdog: Watchdog = msgspec.field(default_factory=Watchdog)
    watched: WatchedSteps = msgspec.field(default_factory=WatchedSteps)
    rewind: Rewind = msgspec.field(default_factory=Rewind)

    @property
    def bounds(self) -> StalenessBounds:
        """The staleness bounds in versions: engines reload when j behind, and rollouts older than k are not trained."""
        j = self.knobs.j or (1 if self.lag.turns.are_taken else int(min(self.lag.j, self.knobs.k)))
        return StalenessBounds(j, self.knobs.k)

    def live_actors(self, now: float) -> list[ActorAlive]:
        """Return the last heartbeats of all actors that are not silent."""
        return [alive for alive, reported_at in self.actors.values() if now - reported_at <= SILENT_S]

    @property
    def good_version(self) -> int:
        """The newest version that is known to be good: the best by rewards, or by accuracy if that one is newer."""
        known = [each for each in self.evaluations.results if each.place == 0 and each.at_least is not None]
        best = max(known, key=lambda each: each.at_least or 0.0, default=None)
        return max(int(self.watched.rewards.best_version), 0 if best is None else best.model_version)

    def domain_weights_of(self, index: int) -> dict[str, float]:
        """Return the domain weights at the first issue of order `index`, so that a reissue gets the same problem."""
        for change in reversed(self.knob_log):
            if change.cursor <= index and "domain_weights" in change.changes:
                return self._drawable(change.changes["domain_weights"])
        return self._drawable(self.first_domain_weights)

    def follow(self, loaded: int) -> None:
        """Record in `quotas` and `loaded_from` what applies to orders issued from now on: engines have `loaded`."""
        if not self.quotas or self.quotas[-1].size != self.knobs.groups_per_step:
            since = self.account.cursor if self.quotas else 0
            self.quotas = [quota for quota in self.quotas if quota.since < since]
            self.quotas.append(Quota(since, self.knobs.groups_per_step))
        # The first entry applies from order 0 on: a trainer has just begun, and all orders in flight are issued again.
        if not self.loaded_from or self.loaded_from[-1][1] != loaded:
            since = self.account.cursor if self.loaded_from else 0
            self.loaded_from = [*(each for each in self.loaded_from if each[0] < since), (since, loaded)]
        frontier = self.account.consumed.frontier
        while len(self.loaded_from) > 1 and self.loaded_from[1][0] <= frontier:
            self.loaded_from = self.loaded_from[1:]

    def quota_of(self, index: int) -> Quota:
        """Return the size of the blocks with exact domain shares, as of the first issue of order `index`."""
        return next(quota for quota in reversed(self.quotas) if quota.since <= index)

    def _drawable(self, weights: dict[str, float]) -> dict[str, float]:
        """Restrict domain weights to the current domains, since the recipe may have been edited."""
        return {domain: weights.get(domain, 0.0) for domain in self.knobs.domain_weights}

    def checkpoint_record(self) -> dict[str, Any]:
        """Return the part of the state that belongs in a checkpoint, as plain values."""
        return {
            "epoch": self.epoch,
            "account": self.account.to_record(),
            "knobs": self.knobs.to_json(),
            "first_domain_weights": self.first_domain_weights,
            "filtered_share": msgspec.to_builtins(self.filtered_share),
            "lag": msgspec.to_builtins(self.lag),
            "cooldown": msgspec.to_builtins(self.cooldown),
            "quotas": [list(quota) for quota in self.quotas],
            "knob_log": [msgspec.to_builtins(change) for change in self.knob_log],
            "evaluations": [msgspec.to_builtins(result) for result in self.evaluations.results],
            "rewound": self.rewind.done,
        }

    def resume(self, record: Mapping[str, Any], *, step: int) -> None:
        """Continue from the `checkpoint_record` of a step; the trainer's counts of orders arrive with `TrainerReady`.

        The recipe, which may have been edited, provides the knobs; live changes override them. Reissued orders keep the
        domain weights with which their problems were first drawn. Raises RecipeError if the knobs are then invalid.
        """
        self.epoch, self.resumed_step = int(record["epoch"]), step
        before, recipe = record["knobs"], self.knobs
        self.knob_log = [KnobChange(**change) for change in record["knob_log"]]
        self.first_domain_weights = record.get("first_domain_weights", self.first_domain_weights)
        self.filtered_share = msgspec.convert(record.get("filtered_share", {}), FilteredShare)
        self.lag = msgspec.convert(record.get("lag", {}), LagRule)
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
        self.rewind.done = record.get("rewound", False)


#: The alarms use the newest `WINDOW` steps, and the entropies of the run's first `FIRST_STEPS` steps.
WINDOW: Final = 25
FIRST_STEPS: Final = 10


class DomainCounts(msgspec.Struct, frozen=True, array_like=True):
    """Counts of one domain in one step: rollouts, truncated ones, groups, stale groups, unjudged rollouts."""

    rollouts: float = 0
    truncated: float = 0
    groups: float = 0
    stale: float = 0
    unjudged: float = 0


class WatchedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step's metrics as used by alarms; None if not measured. `right` is the share of correct rollouts."""

    step: int
    entropy: float | None = None
    right: float | None = None
    age: float | None = None
    ess: float | None = None
    length: float | None = None
    domains: dict[str, DomainCounts] = {}
    trained: Sampled = Sampled()
    stale: Sampled = Sampled()
    """Answers that arrived and were dropped as stale, since the step before."""
    given_up: int = 0
    """The number of groups that actors gave up as stale since the step before."""


def discarded_over(steps: Sequence[WatchedStep]) -> tuple[float, float]:
    """Return the share of the sampled tokens that was discarded as stale over these steps, and a ratio of lengths.

    The ratio is the mean length of trained answers by that of all answers that arrived: below 1 if short answers are
    favoured. Groups that actors gave up count as groups of mean length, though most are longer.
    """
    answers, tokens = sum(step.trained.answers for step in steps), sum(step.trained.tokens for step in steps)
    if not tokens:
        return 0.0, 1.0
    domains = [each for step in steps for each in step.domains.values()]
    size = sum(each.rollouts for each in domains) / max(1.0, sum(each.groups for each in domains))
    stale = sum(step.stale.tokens for step in steps)
    length = (tokens + stale) / (answers + sum(step.stale.answers for step in steps))
    discarded = stale + length * size * sum(step.given_up for step in steps)
    return discarded / (discarded + tokens), tokens / answers / length


#: The default limit on the number of orders issued for each order that is expected to be trained, and not filtered.
OVERSAMPLED: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """The settings of a recipe that the controller uses."""

    run: RunSection
    max_groups: int
    sampling: Sampling
    by_domain: Mapping[str, DomainSampling] = field(default_factory=dict)
    evaluation: EvaluationPlan
    no_signal: NoSignal = NoSignal.FILTER
    """The treatment of groups whose rewards are all equal."""
    save_s: float = 30.0
    """Seconds to wait for the trainer's state to be saved when a run fails or is suspended."""
    scope: StalenessScope = StalenessScope.GROUP
    """The unit to drop if a token is too old: its group, which actors then abandon early, or only its rollout."""
    overdue: Overdue = Overdue.DROP
    """The treatment of groups that are still being sampled at their last admissible step."""
    oversample: float | None = 1.0
    """The most orders issued per order that is expected to train; None: `OVERSAMPLED` while k > j, otherwise 1."""
    lag_loss: float | None = None
    """κ of the objective (`PolicyObjective.lag_loss`); None if nothing in it corrects for lag."""
    cores: tuple[int, ...] = ()
    """The cores that engines and trainer share, and may use in turn (`Turns`); empty if they do not."""
    cooldown: Mapping[str, CooldownSection] = field(default_factory=dict)
    elastic: ElasticSection | None = None
    """The rule for scaling the number of engines automatically; None: only operators change it."""
    checkpoint_interval_steps: int
    engines_expected: int
