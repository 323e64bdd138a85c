"""A simulated run in which anything may fail in any order, with the real `Controller` and the real `Batcher`.

`UnfairWorld.suffer` makes one random event: any role may change, fail, lag or die. `UnfairWorld.recover` then lets
every role work in rounds: from any state, the run must reach its next steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import msgspec

from pipelinerl.controller.decisions.controller import Controller
from pipelinerl.controller.decisions.giving_up import waiting_for
from pipelinerl.controller.state.fleet import EngineLifecycle
from pipelinerl.controller.state.inputs_and_effects import (
    AnyInput,
    Effect,
    EngineAnswered,
    EngineDrainAsked,
    EngineIdle,
    EngineRestarted,
    EngineTimedOut,
    Finish,
    HealthCheckMissed,
    IssuePrompts,
    KnobsPatched,
    Send,
    StreamsLost,
    Ticked,
)
from pipelinerl.enums import NoSignal, Pin, StalenessScope
from pipelinerl.messages import (
    CanaryChecked,
    ConsumedReport,
    Directive,
    GroupOutdated,
    OrdersEnded,
    Question,
    Report,
    Starving,
)
from pipelinerl.staleness import StalenessBounds
from pipelinerl.training.rollouts.admission import ConsumedLedger, GroupOutcome, Lineage
from pipelinerl.training.rollouts.batcher import Batcher, StepBudget
from pipelinerl.types import PromptOrder, Purpose, Rollout, RolloutGroup
from tests.controller.world import alive, answered, controller, failed, joins, published, ready, received, step_done
from tests.fakes.rollouts import rollout

URLS: Final = ("http://engine-0", "http://engine-1", "http://engine-2")
K: Final = (1, 2, 3, 5, 8, 16, 32)
#: Seconds per round of `recover`. Evaluation deadlines are multiples of it (see `unfair_controller`).
TICK_S: Final = 5.0
#: The number of groups in flight at which the controller issues no more prompts.
ROOM: Final = 16


def unfair_controller(rng: random.Random) -> Controller:
    """Return a controller with random evaluation and staleness settings; no test reaches its step or time limits."""
    return controller(
        evaluation_problems=2 if rng.random() < 0.5 else 0,
        pin=rng.choice(list(Pin)),
        hold_s=2 * TICK_S,
        grace_s=4 * TICK_S,
        steps=10**6,
        engine_timeout_s=1e9,
        checkpoint_interval_steps=5,
        oversample=rng.choice([1.0, None]),
        scope=rng.choice(list(StalenessScope)),
        room=ROOM,
        max_groups=ROOM,
        k=8.0,
        evaluation_interval_steps=3,
    )


@dataclass
class UnfairWorld:
    """The simulated roles around the controller: operator, engines, trainer, actors, stream server and clock."""

    rng: random.Random
    controller: Controller
    now: float = 1.0
    # State of the engines, by URL: the incarnation that runs there (0: none), and the version and epoch that it serves.
    lives: dict[str, int] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)
    epoch_served: dict[str, int] = field(default_factory=dict)
    lives_begun: int = 0
    # State of the trainer.
    epoch: int = 0
    version: int = 0
    question: Question | None = None
    directive: Directive | None = None
    inbox: list[Directive] = field(default_factory=list)
    publication: Directive | None = None
    proofs: Directive | None = None
    checkpoint: tuple[int, dict[str, Any]] = (0, {})
    epochs: tuple[tuple[int, int], ...] = ()
    reported: ConsumedReport = field(default_factory=ConsumedReport)
    arrived: list[RolloutGroup] = field(default_factory=list)
    read: int = 0
    # State of the actors.
    orders: list[PromptOrder] = field(default_factory=list)
    sampling: list[tuple[PromptOrder, str, int, int]] = field(default_factory=list)
    """Each order in progress, with its engine, and the epoch and version that began to sample it."""
    trained: dict[int, list[int]] = field(default_factory=dict)
    """The orders of the last step that made each version."""
    history: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    """Publications directed while the same one was under way."""
    forgetful: bool = False
    """True if the stream server has lost entries: then a publication may be directed again."""

    reliable: bool = False
    """True if publications that the trainer awaits before a step succeed."""

    def __post_init__(self) -> None:
        self.begin_trainer()
        self.offer(URLS[0])

    # --- random events -----------------------------------------------------------------------------------------------

    def suffer(self) -> None:
        happens: list[tuple[Callable[[], None], int]] = [
            (self.turn_knobs, 4), (self.work, 12), (self.read_directives, 2), (self.step, 2), (self.publish, 2),
            (self.prove, 2), (self.tick, 3), (self.lose_engine, 1), (self.lag, 1), (self.engine_returns, 2),
            (self.new_engine, 1), (self.drain, 1), (self.lose_actor, 1), (self.starve, 1), (self.lose_trainer, 1),
            (self.lose_streams, 1),
        ]  # fmt: skip
        (what,) = self.rng.choices([each for each, _ in happens], [weight for _, weight in happens])
        self.history.append(what.__name__)
        what()

    def work(self) -> None:
        """Let every role work; publications may fail."""
        self.read_directives()
        self.publish()
        self.prove()
        for _ in range(self.rng.randrange(12)):
            self.sample()
        for _ in range(self.rng.randrange(12)):
            self.answer()
        self.read_directives()
        self.step()

    def recover(self, *, steps: int, rounds: int) -> str:
        """Let every role work until `steps` more steps are made; return "", or what a stuck run waits for."""
        goal = self.controller.state.version + steps
        for _ in range(rounds):
            if self.controller.state.version >= goal:
                return ""
            self.tick()
            for record in self.controller.state.fleet.records():
                if record.lifecycle is EngineLifecycle.DRAINING:
                    self.give(EngineIdle(now=self.now, url=record.url))
                elif record.lifecycle is not EngineLifecycle.EXPELLED:
                    self._return_engine(record.url)
            if not self.controller.state.fleet.members() and not self.controller.state.fleet.pinned():
                self.offer(URLS[0])
            for _ in range(3):
                self.read_directives()
                self.publish(fair=True)
                self.prove(fair=True)
                while self.orders and self.sample():
                    pass
                while self.sampling:
                    self.answer(fair=True)
                self.step()
            if self.question is not None:
                self._repeat(self.question)
            else:
                self.starve()
        return waiting_for(self.controller.state, now=self.now)

    # --- the operator ------------------------------------------------------------------------------------------------

    def turn_knobs(self) -> None:
        k = self.rng.choice(K)
        changes: dict[str, Any] = {"j": self.rng.randint(1, k), "k": k}
        if self.rng.random() < 0.3:
            changes["rollouts_per_step"] = 2 * self.rng.randint(1, 8)
        if self.rng.random() < 0.3:
            changes["groups_in_flight"] = self.rng.randint(4, 128)
        self.give(KnobsPatched(now=self.now, changes=changes, who="test", time=0.0))

    def drain(self) -> None:
        url = self.rng.choice(URLS)
        if url in self.controller.state.fleet.by_url:
            self.give(EngineDrainAsked(now=self.now, url=url, grace_s=TICK_S))

    # --- engines -----------------------------------------------------------------------------------------------------

    def offer(self, url: str) -> None:
        self.lives_begun += 1
        self.lives[url], self.served[url] = self.lives_begun, -1
        self.give(joins(url, str(self.lives_begun), now=self.now))

    def new_engine(self) -> None:
        self.offer(self.rng.choice(URLS))

    def lose_engine(self) -> None:
        url = self.rng.choice(URLS)
        if self.lives.get(url):
            self.lives[url] = 0
            self.give(EngineTimedOut(now=self.now, url=url, reason="test"))

    def lag(self) -> None:
        url = self.rng.choice(URLS)
        if url in self.controller.state.fleet.by_url:
            self.give(HealthCheckMissed(now=self.now, url=url))

    def engine_returns(self) -> None:
        for url in URLS:
            if url in self.controller.state.fleet.by_url:
                self._return_engine(url)

    def _return_engine(self, url: str) -> None:
        if not self.lives.get(url):
            if self.rng.random() < 0.5:
                self.offer(url)
                return
            self.lives_begun += 1
            self.lives[url], self.served[url] = self.lives_begun, -1
            self.give(EngineRestarted(now=self.now, url=url))
        lost = (EngineLifecycle.SUSPECT, EngineLifecycle.DEAD, EngineLifecycle.DIRTY)
        if self.controller.state.fleet.by_url[url].lifecycle in lost:
            self.give(EngineAnswered(now=self.now, url=url))

    # --- the trainer -------------------------------------------------------------------------------------------------

    def begin_trainer(self) -> None:
        """Start a trainer from the checkpoint; it reads the stream again from the checkpoint's position."""
        self.version, ledger = self.checkpoint
        self.batcher = Batcher(
            ledger=ConsumedLedger.from_record(ledger) if ledger else ConsumedLedger(),
            lineage=Lineage(0, self.version),
            no_signal=NoSignal.FILTER,
            scope=self.controller.settings.scope,
        )
        self.read = 0
        self.directive = self.publication = self.proofs = None
        self._ask(ready(f"{self.rng.random()}", version=self.version, consumed=self._consumed()))

    def lose_trainer(self) -> None:
        if self.rng.random() < 0.3:
            self.inbox.clear()
            self.begin_trainer()

    def read_directives(self) -> None:
        """Act on valid directives, like `ControllerLink` and `TrainingLoop`."""
        while self.inbox:
            directive = self.inbox.pop(0)
            if self.directive is not None and directive.epoch != self.epoch:
                continue
            is_answer = self.question is not None and directive.answers == self.question.report_id
            prefixes = ("ready-", "leave-", f"e{self.epoch}-step-", f"e{self.epoch}-skip-")
            if not is_answer and (self.directive is None or directive.answers.startswith(prefixes)):
                continue
            if self.directive is None:
                self.epoch = directive.epoch
                self.batcher.lineage = Lineage(self.epoch, self.version, self.epochs)
                self.epochs = (*self.epochs, (self.epoch, self.version))
            self.directive = directive
            self.question = None if is_answer else self.question
            self.batcher.end(directive.failed, GroupOutcome.FAILED)
            self.batcher.end(directive.stale, GroupOutcome.STALE)
            if directive.publish_to:
                self._end_publication()
                self.publication = directive
            if directive.checkpoint:
                self.checkpoint = (self.version, self.batcher.ledger.to_record())
        if self.directive is not None:
            for each in self.arrived[self.read :]:
                self.batcher.offer(each, k=self.directive.knobs.k)
            self.read = len(self.arrived)

    def publish(self, *, fair: bool = False) -> None:
        """End the current weight publication: each engine gets the weights, fails, or is skipped."""
        if self.publication is None:
            return
        directive, self.publication = self.publication, None
        fails, skips = (0.0, 0.0) if fair else self.rng.choice([(0.0, 0.0), (0.5, 0.0), (0.0, 0.5), (0.0, 1.0)])
        pauses: list[str] = []
        lost: dict[str, str] = {}
        for url in directive.publish_to:
            if not self.lives.get(url) or self.rng.random() < fails:
                lost[url] = "test"
            elif not self.rng.random() < skips:
                self.served[url], self.epoch_served[url] = self.version, self.epoch
                pauses.append(url)
        to_verify = [url for url in directive.to_verify if url in pauses]
        self.proofs = msgspec.structs.replace(directive, to_verify=to_verify) if to_verify else None
        about = {"epoch": self.epoch, "membership": directive.membership, "directive": directive.answers}
        self.tell(published(pauses, version=self.version, failed=lost, **about))

    def prove(self, *, fair: bool = False) -> None:
        """Let engines pass the canary check of a publication, or fail to answer it."""
        if self.proofs is None:
            return
        directive, self.proofs = self.proofs, None
        proven = [url for url in directive.to_verify if self.lives.get(url) and (fair or self.rng.random() < 0.8)]
        self.tell(
            CanaryChecked(
                epoch=self.epoch,
                model_version=self.version,
                membership=directive.membership,
                worst=dict.fromkeys(proven, 0.0),
                failed={url: "test" for url in directive.to_verify if url not in proven},
            )
        )

    def _end_publication(self) -> None:
        self.publish(fair=self.reliable)
        self.prove(fair=self.reliable)

    def step(self) -> None:
        """Let the trainer take a step if it can; otherwise let it report orders that ended without a step."""
        if self.directive is None or self.question is not None:
            return
        budget = StepBudget(rollouts=self.directive.knobs.rollouts_per_step)
        bounds = StalenessBounds(1, self.directive.knobs.k)
        groups = self.batcher.take(budget, producing=self.version + 1, bounds=bounds)
        if groups is None:
            before, again = self.reported, self.batcher.take_abandoned()
            if self._consumed() != before or again:
                self.tell(
                    OrdersEnded(epoch=self.epoch, model_version=self.version, consumed=self.reported, again=again)
                )
            return
        self._end_publication()
        self.version += 1
        self.trained[self.version] = [group.index for group in groups]
        stats = {"waiting_groups": len(self.batcher.waiting)}
        self._ask(step_done(self.version, self._consumed(), epoch=self.epoch, stats=stats))

    def starve(self) -> None:
        if self.directive is not None and self.question is None:
            self.tell(Starving(epoch=self.epoch, model_version=self.version, held=self.batcher.waiting))

    def _ask(self, question: Question) -> None:
        self.question = question
        self.tell(question)

    def _repeat(self, question: Question) -> None:
        """Ask again, since the report or its answer may be lost: publications ordered before it are ordered again."""
        before, self.forgetful = self.forgetful, True
        self.tell(question)
        self.forgetful = before

    def _consumed(self) -> ConsumedReport:
        ledger = self.batcher.ledger
        counts = {str(fate): count for fate, count in ledger.counts.items()}
        self.reported = ConsumedReport(**counts, frontier=ledger.frontier, beyond=sorted(ledger.beyond))
        return self.reported

    # --- actors ------------------------------------------------------------------------------------------------------

    def sample(self) -> bool:
        """Let an actor begin an order on an engine that may get work; return False if there is none."""
        if not self.orders:
            return False
        fleet, order = self.controller.state.fleet, self.orders[0]
        able = [url for url in fleet.serving() if self.lives.get(url)]
        if order.engine:
            able = [order.engine] if order.engine in fleet.pinned() and self.lives.get(order.engine) else []
        if not able and not order.engine:
            return False
        self.orders.pop(0)
        if not able:
            self.tell(failed(order, "gone"))
            return True
        url = self.rng.choice(able)
        self.sampling.append((order, url, self.epoch_served[url], self.served[url]))
        return True

    def answer(self, *, fair: bool = False, gives_up: bool | None = None) -> None:
        """End an order: with a group, an evaluation answer or a failure, or because it is too old."""
        gives_up = not fair if gives_up is None else gives_up
        if not self.sampling:
            return
        order, url, epoch, began = self.sampling.pop(self.rng.randrange(len(self.sampling)))
        newest = max(began, self.served[url])
        if order.purpose is Purpose.EVALUATION:
            self.tell(answered(order.order_id, order.index, versions=(began, newest), epoch=epoch))
        elif not fair and self.rng.random() < 0.05:
            self.tell(failed(order, issued_at=order.issued_at))
        elif gives_up and self.controller.state.version + 1 - began > self.controller.state.knobs.k:
            about = {"order_id": order.order_id, "index": order.index, "issued_at": order.issued_at}
            self.tell(GroupOutdated(oldest=began, current=self.controller.state.version, **about))
        else:
            signal = fair or self.rng.random() < 0.8
            rollouts = (
                made_rollout(0.0 if signal else 1.0, began, epoch),
                made_rollout(1.0, self.rng.randint(began, newest), epoch),
            )
            self.arrived.append(
                RolloutGroup(
                    group_id=order.order_id,
                    index=order.index,
                    domain="test",
                    actor="actor-0",
                    rollouts=rollouts,
                    issued_at=order.issued_at,
                )
            )

    def lose_actor(self) -> None:
        """Let an actor die; its orders go to other actors."""
        self.orders += [order for order, *_ in self.sampling]
        self.sampling.clear()

    # --- the stream server and the clock -----------------------------------------------------------------------------

    def lose_streams(self) -> None:
        """Let the stream server lose its newest entries and the controller notice."""
        if self.rng.random() < 0.3:
            self.inbox = self.inbox[: self.rng.randint(0, len(self.inbox))]
            self.orders = self.orders[: self.rng.randint(0, len(self.orders))]
            self.forgetful = True
            self.give(StreamsLost(now=self.now))

    def tick(self) -> None:
        self.now += TICK_S
        self.tell(alive(groups=len(self.sampling)))
        self.give(Ticked(now=self.now))

    def tell(self, report: Report) -> None:
        self.give(received(report, self.now))

    def give(self, given: AnyInput) -> None:
        for effect in self.controller.decide(given):
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case IssuePrompts(orders):
                self.orders += orders
            case Send(directive):
                waiting = [*self.inbox, *([] if self.publication is None else [self.publication])]
                wanted = (directive.epoch, directive.membership, directive.publish_to)
                known = [(each.epoch, each.membership, each.publish_to) for each in waiting if each is not directive]
                if directive.answers.startswith("publish-") and wanted in known and not self.forgetful:
                    self.repeated.append(directive.answers)
                self.inbox.append(directive)
            case Finish(reason):
                raise AssertionError(f"the run has ended: {reason}")


@cache
def made_rollout(reward: float, version: int, epoch: int) -> Rollout:
    """Return a rollout; it is cached, because creating rollouts would dominate the run time of the tests."""
    return rollout(reward=reward, version=version, epoch=epoch)


def played(seed: int, *, events: int = 30, steps: int = 2, rounds: int = 20) -> tuple[UnfairWorld, str]:
    """Make up to `events` random events, and recover; return the world, and what `recover` returned."""
    rng = random.Random(seed)
    world = UnfairWorld(rng, unfair_controller(rng))
    world.recover(steps=world.rng.randrange(2), rounds=rounds)
    for _ in range(world.rng.randrange(events)):
        world.suffer()
    return world, world.recover(steps=steps, rounds=rounds)
