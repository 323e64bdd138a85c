"""A simulated run around the real `Controller` and `Batcher`: no clock, no I/O, all choices from one seed.

An engine is represented by the version that it serves, and the actors by a list of orders in progress.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipelinerl.config.evaluation import EvaluationSet
from pipelinerl.config.sections import RunSection
from pipelinerl.controller.decisions.controller import Controller
from pipelinerl.controller.state.evaluation import EvaluationPlan
from pipelinerl.controller.state.inputs_and_effects import (
    AnyInput,
    Effect,
    EngineRegistered,
    Finish,
    IssuePrompts,
    ReportReceived,
    Send,
)
from pipelinerl.controller.state.knobs import Knobs
from pipelinerl.controller.state.run_state import ControllerSettings, RunState
from pipelinerl.enums import NoSignal, Overdue, Pin
from pipelinerl.messages import (
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
from pipelinerl.types import DomainSampling, Message, Problem, PromptOrder, Purpose, Quota, RolloutGroup, Sampling
from tests.fakes.rollouts import group

ENGINE = "http://engine-0"


def problem(index: int) -> Problem:
    return Problem(problem_id=str(index), domain="test", messages=(Message("user", f"{index}"),), ground_truth="")


def held_out_problem(name: str, index: int) -> Problem:
    return replace(problem(index), domain=name)


def of_two_sizes(index: int, weights: Mapping[str, float], quota: Quota, ahead: int = 0) -> Problem:
    """Return a problem of domain `a`, which has large groups, or of domain `b`; the two alternate irregularly."""
    return replace(problem(index), domain="a" if index * 7 % 5 < 2 else "b")


def drawn_problem(index: int, weights: Mapping[str, float], quota: Quota, ahead: int = 0) -> Problem:
    drawn = ",".join(f"{name}={weight:g}" for name, weight in weights.items())
    return replace(problem(index), domain=f"{drawn} in {quota.size} from {quota.since}")


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
    steps: int = 20,
    evaluation_problems: int = 3,
    pin: Pin = Pin.NONE,
    samples: int = 1,
    oversample: float | None = 1.0,
    overdue: Overdue = Overdue.DROP,
    large: int = 0,
    other_sets: tuple[EvaluationSet, ...] = (),
    until_accuracy: float | None = None,
    room: int = 50,
    **changes: Any,
) -> Controller:
    """Return a controller that expects one engine; `large`, unless it is 0, is the group size of domain `a`."""
    if large:
        changes["group_sizes"] = {"a": large, "b": 2}
    first_set = EvaluationSet(problems=evaluation_problems, max_tokens=8, samples=samples)
    plan = EvaluationPlan(sets=(first_set, *other_sets) if evaluation_problems else (), pin=pin)
    settings = ControllerSettings(
        run=RunSection(steps=steps, until_accuracy=until_accuracy, engine_timeout_s=300.0),
        max_groups=room,
        sampling=Sampling(num_samples=2),
        by_domain={"a": DomainSampling(group_size=large)} if large else {},
        evaluation=plan,
        checkpoint_interval_steps=10,
        engines_expected=1,
        oversample=oversample,
        overdue=overdue,
    )
    start = knobs(**changes)
    state = RunState(knobs=start, first_domain_weights=start.domain_weights)
    drawn = of_two_sizes if large else drawn_problem
    return Controller(settings, state, training_problem=drawn, held_out_problem=held_out_problem)


@dataclass
class World:
    """The simulated engine, trainer and actors around the controller, and a record of what happened."""

    controller: Controller
    rng: random.Random
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
    def issued(self) -> list[int]:
        """The indices of the training orders, in the order in which they were issued."""
        return [order.index for order in self.orders_issued]

    def tell(self, report: Report) -> None:
        self.give(ReportReceived(now=0.0, report=report, entry_id="1-0"))
        self.controller.state.account.check()

    def give(self, given: AnyInput) -> None:
        """Send an input to the controller, and carry out its effects."""
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

    def begin(self) -> None:
        for url in self.engines:
            self.give(EngineRegistered(now=0.0, url=url))
        self.awaiting = "ready-1"
        self.tell(TrainerReady(report_id="ready-1", incarnation="1", model_version=0, consumed=self.consumed()))

    def consumed(self) -> ConsumedReport:
        ledger = self.batcher.ledger
        counts = {str(fate): n for fate, n in ledger.counts.items()}
        return ConsumedReport(**counts, frontier=ledger.frontier, beyond=sorted(ledger.beyond))

    def act(self) -> None:
        """Make one random event."""
        self.rng.choice([self.sample, self.sample, self.answer, self.answer, self.publish, self.train])()

    def sample(self) -> None:
        """Let an actor begin an order, on the engine that the order names, or else on any engine that serves."""
        if self.orders and len(self.sampling) < 6:
            order = self.orders.pop(0)
            url = order.engine or self.rng.choice(self.controller.state.fleet.serving() or [ENGINE])
            self.where[order.order_id] = url
            self.sampling.append((order, self.loaded.get(url, 0)))

    def answer(self) -> None:
        """End an order in progress: as a group, a failure, or an evaluation answer."""
        if not self.sampling:
            return
        order, began = self.sampling.pop(self.rng.randrange(len(self.sampling)))
        if order.purpose is Purpose.EVALUATION:
            self.tell(
                EvaluationDone(
                    order_id=order.order_id,
                    index=order.index,
                    correct=1,
                    judged=1,
                    oldest_version=began,
                    newest_version=self.loaded.get(self.where[order.order_id], 0),
                    num_tokens=1,
                    epoch=self.controller.state.epoch,
                )
            )
        elif self.rng.random() < 0.1:
            self.tell(GroupFailed(order_id=order.order_id, index=order.index, purpose=order.purpose, reason="test"))
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
            self.tell(
                Published(
                    epoch=directive.epoch,
                    model_version=self.served,
                    membership=directive.membership,
                    pauses_s=dict.fromkeys(directive.publish_to, 0.001),
                    failed={},
                    send_s=0.0,
                    total_s=0.0,
                    directive=directive.answers,
                )
            )
            if directive.to_verify:
                self.check(directive)

    def check(self, directive: Directive) -> None:
        self.tell(
            CanaryChecked(
                epoch=directive.epoch,
                model_version=self.served,
                membership=directive.membership,
                worst=dict.fromkeys(directive.to_verify, 1e-6),
            )
        )

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
        groups = self.batcher.take(
            budget, producing=self.version + 1, bounds=StalenessBounds(1, k), must_wait=self._must_wait()
        )
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
        self.tell(
            StepDone(report_id=self.awaiting, epoch=1, model_version=self.version, consumed=self.consumed(), stats={})
        )

    def _must_wait(self) -> Callable[[Sequence[int]], bool] | None:
        """Decide as the training loop does, but without its deadline: a step that never fills waits forever."""
        if self.controller.settings.overdue is Overdue.DROP:
            return None
        assert self.directive is not None
        step, batcher, directive = self.version + 1, self.batcher, self.directive

        def must_wait(chosen: Sequence[int]) -> bool:
            late = awaited(
                step=step, chosen=chosen, waiting=batcher.waiting, ledger=batcher.ledger, directive=directive
            )
            self.waits += bool(late)
            return bool(late)

        return must_wait

    def _skip(self, groups: list[RolloutGroup]) -> None:
        self.batcher.skipped(groups)
        self.skipped += 1
        self.awaiting = f"e1-skip-{self.version}-{self.batcher.ledger.counts[GroupOutcome.FILTERED]}"
        self.tell(
            StepSkipped(
                report_id=self.awaiting,
                epoch=1,
                model_version=self.version,
                consumed=self.consumed(),
                what="rewards",
                groups=[group.index for group in groups],
                in_a_row=self.skipped,
            )
        )

    def _obey(self, directive: Directive) -> None:
        self.directive = directive
        if directive.answers == self.awaiting:
            self.awaiting = ""
        self.batcher.end(directive.failed, GroupOutcome.FAILED)
        self.batcher.end(directive.stale, GroupOutcome.STALE)
        if directive.publish_to:
            self.publications.append((self.version, directive))
