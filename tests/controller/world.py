"""A simulated run around the real `Controller` and `Batcher`: no clock, no I/O, all choices from one seed.

An engine is represented by the version that it serves, and the actors by a list of orders in progress.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pipelinerl.config.evaluation import EvaluationSet
from pipelinerl.config.sections import RunSection
from pipelinerl.controller.decisions.controller import Controller
from pipelinerl.controller.decisions.giving_up import waiting_for
from pipelinerl.controller.state.evaluation import EvaluationPlan
from pipelinerl.controller.state.inputs_and_effects import (
    AnyInput,
    Effect,
    EngineRegistered,
    Finish,
    IssuePrompts,
    Record,
    ReportReceived,
    Send,
)
from pipelinerl.controller.state.knobs import Knobs
from pipelinerl.controller.state.run_state import ControllerSettings, RunState
from pipelinerl.enums import NoSignal, Overdue, Pin
from pipelinerl.messages import (
    ActorAlive,
    CanaryChecked,
    ConsumedReport,
    Directive,
    EvaluationDone,
    GroupFailed,
    GroupOutdated,
    OrdersEnded,
    Published,
    Report,
    StepDone,
    StepSkipped,
    TrainerReady,
    TrainerStopped,
)
from pipelinerl.staleness import StalenessBounds
from pipelinerl.training.rollouts.admission import ConsumedLedger, GroupOutcome, Lineage
from pipelinerl.training.rollouts.batcher import Batcher, StepBudget, awaited
from pipelinerl.types import DomainSampling, Message, Problem, PromptOrder, Purpose, RolloutGroup, Sampling
from tests.fakes.rollouts import group

ENGINE, OTHER = "http://engine-0", "http://engine-1"


def problem(index, domain="test"):
    return Problem(problem_id=str(index), domain=domain, messages=(Message("user", f"{index}"),), ground_truth="")


def drawn_problem(index, weights, quota, ahead=0):
    drawn = ",".join(f"{name}={weight:g}" for name, weight in weights.items())
    return problem(index, f"{drawn} in {quota.size} from {quota.since}")


def knobs(**changes: Any) -> Knobs:
    """Return knobs for small steps: two groups of two rollouts."""
    start = Knobs(
        j=1,
        k=4.0,
        temperature=1.0,
        learning_rate=0.1,
        rollouts_per_step=4,
        evaluation_interval_steps=5,
        groups_in_flight=8,
        domain_weights={"a": 1.0, "b": 2.0},
        group_sizes={"a": 2, "b": 2},
    )
    changes.setdefault("group_sizes", dict.fromkeys(changes.get("domain_weights", start.domain_weights), 2))
    return replace(start, **changes)


def controller(
    *,
    evaluation_problems: int = 3,
    samples: int = 1,
    large: int = 0,
    other_sets: tuple[EvaluationSet, ...] = (),
    room: int = 50,
    **changes: Any,
) -> Controller:
    """Return a controller that expects one engine, with changes of run, evaluation plan, settings and knobs.

    `large`, unless it is 0, is the group size of domain `a`; then the domains `a` and `b` alternate irregularly.
    """

    def own(names):
        return {name: changes.pop(name) for name in names if name in changes}

    if large:
        changes["group_sizes"] = {"a": large, "b": 2}
    first_set = EvaluationSet(problems=evaluation_problems, max_tokens=8, samples=samples)
    plan = {"sets": (first_set, *other_sets) if evaluation_problems else (), "pin": Pin.NONE}
    of_plan = own(each.name for each in fields(EvaluationPlan))
    settings = {
        "run": RunSection(**{"steps": 20, "engine_timeout_s": 300.0} | own(RunSection.model_fields)),
        "max_groups": room,
        "sampling": Sampling(num_samples=2),
        "by_domain": {"a": DomainSampling(group_size=large)} if large else {},
        "evaluation": EvaluationPlan(**plan | of_plan),
        "checkpoint_interval_steps": 10,
        "engines_expected": 1,
    }
    of_settings = own(each.name for each in fields(ControllerSettings) if each.name != "max_groups")
    start = knobs(**changes)
    return Controller(
        ControllerSettings(**settings | of_settings),
        RunState(knobs=start, first_domain_weights=start.domain_weights),
        training_problem=(lambda i, *_: problem(i, "a" if i * 7 % 5 < 2 else "b")) if large else drawn_problem,
        held_out_problem=lambda name, index: problem(index, name),
    )


# --- inputs and reports -----------------------------------------------------------------------------------------------


def received(report: Report, now: float = 0.0) -> ReportReceived:
    return ReportReceived(now=now, report=report, entry_id="1-0")


def joins(url: str, incarnation: str = "1", *, now: float = 0.0, name: str = "", type: str = "torch"):
    return EngineRegistered(now=now, url=url, incarnation=incarnation, name=name, type=type)


def ready(life: str, *, version: int = 0, consumed: ConsumedReport | None = None, claimed: int = 0) -> TrainerReady:
    given = {"consumed": consumed or ConsumedReport(), "claimed": claimed}
    return TrainerReady(report_id=f"ready-{life}", incarnation=life, model_version=version, **given)


def step_done(version: int, consumed: ConsumedReport, *, epoch: int = 1, **fields: Any) -> StepDone:
    given = {"report_id": f"e{epoch}-step-{version}", "stats": {}} | fields
    return StepDone(epoch=epoch, model_version=version, consumed=consumed, **given)


def published(urls, *, version: int, membership: int, epoch: int = 1, failed=None, **fields: Any) -> Published:
    given = {"pauses_s": dict.fromkeys(urls, 0.1), "failed": failed or {}, "send_s": 0.1, "total_s": 0.2} | fields
    return Published(epoch=epoch, model_version=version, membership=membership, **given)


def alive(name: str = "actor-0", *, groups: int = 0, **fields: Any) -> ActorAlive:
    return ActorAlive(name=name, groups_in_flight=groups, **{"groups_done": 0, "retries": 0} | fields)


def answered(order_id: str, index: int, *, correct: int = 1, judged: int = 1, versions=(0, 0), **fields: Any):
    oldest, newest = versions
    given = {"num_tokens": 1, "oldest_version": oldest, "newest_version": newest} | fields
    return EvaluationDone(order_id=order_id, index=index, correct=correct, judged=judged, **given)


def failed(order: PromptOrder, reason: str = "test", **fields: Any) -> GroupFailed:
    return GroupFailed(order_id=order.order_id, index=order.index, purpose=order.purpose, reason=reason, **fields)


# --- effects ----------------------------------------------------------------------------------------------------------


def directives(effects: Sequence[Effect]) -> list[Directive]:
    return [effect.directive for effect in effects if isinstance(effect, Send)]


def records(effects: Sequence[Effect], kind: str = "") -> list[Record]:
    return [effect for effect in effects if isinstance(effect, Record) and kind in ("", effect.kind)]


def kinds(effects: Sequence[Effect]) -> list[str]:
    return [record.kind for record in records(effects)]


@dataclass
class World:
    """The simulated engine, trainer and actors around the controller, and a record of what happened."""

    controller: Controller
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    batcher: Batcher = field(
        default_factory=lambda: Batcher(ledger=ConsumedLedger(), lineage=Lineage(1, 0), no_signal=NoSignal.FILTER)
    )
    version: int = 0
    poison: float = 0.0
    """The share of steps that are not finite."""
    skipped: int = 0
    """Consecutive non-finite steps."""
    served: int = 0
    engines: tuple[str, ...] = (ENGINE,)
    loaded: dict[str, int] = field(default_factory=dict)
    """The version of each engine."""
    where: dict[str, str] = field(default_factory=dict)
    """The engine that samples each order."""
    orders: list[PromptOrder] = field(default_factory=list)
    sampling: list[tuple[PromptOrder, int]] = field(default_factory=list)
    publications: list[tuple[int, Directive]] = field(default_factory=list)
    directive: Directive | None = None
    awaiting: str = ""
    trained: list[tuple[int, list[RolloutGroup], float]] = field(default_factory=list)
    orders_issued: list[PromptOrder] = field(default_factory=list)
    finished: str | None = None
    waits: int = 0
    """The number of times that a full step waited for overdue groups."""

    @property
    def state(self) -> RunState:
        return self.controller.state

    @property
    def issued(self) -> list[int]:
        """The indices of the training orders, in the order in which they were issued."""
        return [order.index for order in self.orders_issued]

    def tell(self, report: Report, now: float = 0.0) -> None:
        self.give(received(report, now))
        self.state.account.check()

    def give(self, given: AnyInput) -> None:
        self.apply(self.controller.decide(given))

    def apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case IssuePrompts(orders):
                    self.orders += orders
                    self.orders_issued += [order for order in orders if order.purpose is Purpose.TRAINING]
                case Send(directive):
                    self._obey(directive)
                case Finish(reason):
                    self.finished = reason

    def begin(self, *, serves: bool = False) -> World:
        """Let the engines join and the trainer become ready; if it `serves`, it also publishes version 0."""
        for url in self.engines:
            self.give(EngineRegistered(now=0.0, url=url))
        self.ready("1")
        if serves:
            self.publish()
        return self

    def ready(self, life: str, version: int = 0) -> None:
        self.awaiting = f"ready-{life}"
        self.tell(ready(life, version=version, consumed=self.consumed()))

    def consumed(self) -> ConsumedReport:
        ledger = self.batcher.ledger
        counts = {str(fate): n for fate, n in ledger.counts.items()}
        return ConsumedReport(**counts, frontier=ledger.frontier, beyond=sorted(ledger.beyond))

    def act(self) -> None:
        self.rng.choice([self.sample, self.sample, self.answer, self.answer, self.publish, self.train])()

    def play(self, happened=None, *, events: int = 60_000, between=None) -> World:
        """Make random events until `happened`, or until the run is finished; call `between` after each event."""
        for _ in range(events):
            if self.finished is not None if happened is None else happened():
                return self
            self.act()
            if between is not None:
                between()
        raise AssertionError(waiting_for(self.state, now=0.0))

    def until_version(self, version: int) -> World:
        return self.play(lambda: self.version >= version)

    def sample(self) -> None:
        """Let an actor begin an order, on the engine that the order names, or else on any engine that serves."""
        if self.orders and len(self.sampling) < 6:
            order = self.orders.pop(0)
            url = order.engine or self.rng.choice(self.state.fleet.serving() or [ENGINE])
            self.where[order.order_id] = url
            self.sampling.append((order, self.loaded.get(url, 0)))

    def answer(self) -> None:
        """End an order in progress: as a group, a failure, or an evaluation answer."""
        if not self.sampling:
            return
        order, began = self.sampling.pop(self.rng.randrange(len(self.sampling)))
        if order.purpose is Purpose.EVALUATION:
            versions = began, self.loaded.get(self.where[order.order_id], 0)
            self.tell(answered(order.order_id, order.index, versions=versions, epoch=self.state.epoch))
        elif self.rng.random() < 0.1:
            self.tell(failed(order))
        elif self.rng.random() < 0.1:
            self.tell(GroupOutdated(order_id=order.order_id, index=order.index, oldest=began, current=self.version))
        else:
            rewards = self.rng.choice([(0.0, 1.0), (1.0, 0.0), (1.0, 1.0)])
            size = order.sampling.num_samples
            self.batcher.offer(group(order.index, (rewards * size)[:size], version=began))

    def publish(self) -> None:
        """Complete a publication in progress, with the canary checks of its engines."""
        if self.publications:
            self.served, directive = self.publications.pop(0)
            self.loaded |= dict.fromkeys(directive.publish_to, self.served)
            about = {"epoch": directive.epoch, "membership": directive.membership}
            self.tell(published(directive.publish_to, version=self.served, directive=directive.answers, **about))
            if directive.to_verify:
                worst = dict.fromkeys(directive.to_verify, 1e-6)
                self.tell(CanaryChecked(model_version=self.served, worst=worst, **about))

    def train(self) -> None:
        """Let the trainer take a step if it has enough groups; otherwise let it report the orders that have ended."""
        if self.directive is None or self.awaiting or self.finished is not None:
            return
        if self.directive.stop:
            while self.publications:
                self.publish()
            self.tell(TrainerStopped(epoch=self.directive.epoch, model_version=self.version))
            self.directive = None
            return
        k = self.directive.knobs.k
        budget = StepBudget(rollouts=self.directive.knobs.rollouts_per_step)
        must_wait = None if self.controller.settings.overdue is Overdue.DROP else self._must_wait
        bounds = StalenessBounds(1, k)
        groups = self.batcher.take(budget, producing=self.version + 1, bounds=bounds, must_wait=must_wait)
        if groups is None:
            self.tell(OrdersEnded(epoch=self.directive.epoch, model_version=self.version, consumed=self.consumed()))
            return
        while self.publications:  # the training loop ends a publication before it changes the weights
            self.publish()
        if self.poison and self.rng.random() < self.poison:
            self._skip(groups)
            return
        self.skipped = 0
        self.version += 1
        self.trained.append((self.version, groups, k))
        self.awaiting = f"e1-step-{self.version}"
        self.tell(step_done(self.version, self.consumed()))

    def _must_wait(self, chosen: Sequence[int]) -> bool:
        """Decide as the training loop does, but without its deadline: a step that never fills waits forever."""
        assert self.directive is not None
        about = {"waiting": self.batcher.waiting, "ledger": self.batcher.ledger, "directive": self.directive}
        late = awaited(step=self.version + 1, chosen=chosen, **about)
        self.waits += bool(late)
        return bool(late)

    def _skip(self, groups: list[RolloutGroup]) -> None:
        self.batcher.skipped(groups)
        self.skipped += 1
        self.awaiting = f"e1-skip-{self.version}-{self.batcher.ledger.counts[GroupOutcome.FILTERED]}"
        self.tell(skipped(self.awaiting, self, [group.index for group in groups], self.skipped))

    def _obey(self, directive: Directive) -> None:
        self.directive = directive
        if directive.answers == self.awaiting:
            self.awaiting = ""
        self.batcher.end(directive.failed, GroupOutcome.FAILED)
        self.batcher.end(directive.stale, GroupOutcome.STALE)
        if directive.publish_to:
            self.publications.append((self.version, directive))


def skipped(report_id: str, run: World, groups: list[int], in_a_row: int) -> StepSkipped:
    about = {"epoch": 1, "model_version": run.version, "consumed": run.consumed(), "what": "rewards"}
    return StepSkipped(report_id=report_id, groups=groups, in_a_row=in_a_row, **about)


def assert_sound(run: World) -> None:
    """Check that no group was too old or trained twice, and that every order has one outcome."""
    for version, groups, k in run.trained:
        assert all(version - trained.oldest_version <= k for trained in groups)
    indices = [trained.index for _, groups, _ in run.trained for trained in groups]
    assert len(indices) == len(set(indices)), "a group was trained twice"
    ledger = run.state.account.ledger()
    assert ledger["trained"] == len(indices)
    assert ledger["issued"] == sum(count for outcome, count in ledger.items() if outcome != "issued")
