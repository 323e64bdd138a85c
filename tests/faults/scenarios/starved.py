"""Nothing can be trained (no engine, no signal, no room, no answer): no hang, no step, and the cause is named.

Controller and batcher run in the simulated world of tests/controller. Each seed runs normally for a while, then is in
one situation for ten minutes: no step may happen, and the watchdog must name the cause once. Then the run must
continue.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import final

import msgspec

from pipelinerl.controller.decisions.controller import Controller
from pipelinerl.controller.state.inputs_and_effects import (
    EngineRegistered,
    EngineTimedOut,
    KnobsPatched,
    Record,
    Ticked,
)
from pipelinerl.errors import RecipeError
from pipelinerl.messages import ActorAlive, GroupFailed, TrainerReady
from tests.controller.world import ENGINE, World, controller
from tests.fakes.rollouts import group
from tests.faults.scenarios.scenario import Verdict

SHORT = range(27)
LONG = range(1000)

STANDSTILL_S = 600
RELIEF_S = 3000
BEAT_S = 5


class Situation(Enum):
    """A situation that stops training; its value is the cause that the watchdog must report."""

    NO_ENGINE = "an engine to join"
    DEAD_ENGINE = f"an engine to join; {ENGINE} is dead: connection refused"
    NO_SIGNAL = "filtered (their rewards do not differ"
    ALL_FAIL = "failed (their actor gave up"
    ALL_STALE = "stale (sampled by weights older than k allows"
    DEAD_ACTOR = "actor actor-0 has been silent"
    DEAD_TRAINER = "the trainer's last report"
    NO_PUBLICATION = "the trainer"
    NO_ROOM = "streams.max_groups"


@final
@dataclass
class TimedController:
    """The real controller with a clock, which the simulated world lacks, and with a list of its records."""

    inner: Controller
    now: float = 0.0
    records: list[Record] = field(default_factory=list)

    def decide(self, given):
        effects = self.inner.decide(msgspec.structs.replace(given, now=self.now))
        self.records += [effect for effect in effects if isinstance(effect, Record)]
        return effects

    def __getattr__(self, name):
        return getattr(self.inner, name)


@dataclass
class Starved:
    """A simulated run that works, lacks something for a while (`situation`), then works again."""

    situation: Situation
    world: World
    timed: TimedController
    rng: random.Random
    starving: bool = False

    def second(self):
        """Advance the clock by one second, and let one randomly chosen event happen."""
        self.timed.now += 1.0
        world = self.world
        no_engine = self._is(Situation.NO_ENGINE) or self._is(Situation.DEAD_ENGINE)
        acting = not (no_engine or self._is(Situation.DEAD_ACTOR))
        training = not (
            self._is(Situation.DEAD_TRAINER) or (self._is(Situation.NO_PUBLICATION) and bool(self.world.publications))
        )
        possible: list[Callable[[], None]] = [world.sample, self._answer] * 2 if acting else []
        possible += [world.train] if training else []
        possible += [world.publish] if training and not self._is(Situation.NO_PUBLICATION) else []
        self.rng.choice(possible or [lambda: None])()
        if self.timed.now % BEAT_S == 0 and not self._is(Situation.DEAD_ACTOR):
            self.world.tell(ActorAlive(name="actor-0", groups_in_flight=1, groups_done=0, retries=0))
        self.world.give(Ticked(now=0.0))
        self.world.controller.state.account.check()

    def begin(self):
        if self.situation is Situation.NO_ENGINE:
            self.starving = True
            world = self.world
            world.awaiting = "ready-1"
            world.tell(TrainerReady(report_id="ready-1", incarnation="1", model_version=0, consumed=world.consumed()))
        else:
            self.world.begin()

    def fall(self):
        """Enter the situation; return the message of the error that this raises, or "" if it raises none."""
        self.starving = True
        match self.situation:
            case Situation.DEAD_ENGINE:
                self.world.give(EngineTimedOut(now=0.0, url=ENGINE, reason="connection refused"))
            case Situation.NO_ROOM:
                try:
                    self.world.give(KnobsPatched(now=0.0, changes={"rollouts_per_step": 14}, who="test", time=0.0))
                except RecipeError as error:
                    return str(error)
        return ""

    def relieve(self):
        self.starving = False
        if self.situation in (Situation.NO_ENGINE, Situation.DEAD_ENGINE):
            for life in ("one life", "the next"):
                self.world.give(EngineRegistered(now=0.0, url=ENGINE, incarnation=life))

    def _is(self, situation):
        return self.starving and self.situation is situation

    def _answer(self):
        world = self.world
        spoilt = {Situation.NO_SIGNAL, Situation.ALL_FAIL, Situation.ALL_STALE}
        if not (self.starving and self.situation in spoilt):
            world.answer()
        elif world.sampling:
            order, began = world.sampling.pop(self.rng.randrange(len(world.sampling)))
            match self.situation:
                case Situation.NO_SIGNAL:
                    world.batcher.offer(group(order.index, self.rng.choice([(0.0, 0.0), (1.0, 1.0)]), version=began))
                case Situation.ALL_STALE:
                    world.batcher.offer(group(order.index, (0.0, 1.0), version=0))
                case Situation.ALL_FAIL:
                    world.tell(
                        GroupFailed(order_id=order.order_id, index=order.index, purpose=order.purpose, reason="test")
                    )


def drawn(seed):
    rng = random.Random(seed)
    situation = list(Situation)[seed % len(Situation)]
    j, k = rng.choice([(1, 1.0), (1, 2.0), (2, 4.0), (1, math.inf)])
    k = min(k, 4.0) if situation is Situation.ALL_STALE else k
    made = controller(steps=10_000, evaluation_problems=0, j=j, k=k, max_groups=6)
    # The controller would end a run that has no engine for `engine_timeout_s`; here the run must wait without limit.
    made.settings = replace(
        made.settings,
        max_groups=rng.choice([2, 3, 6]),
        run=made.settings.run.model_copy(update={"engine_timeout_s": 1e9}),
    )
    timed = TimedController(made)
    return Starved(situation, World(timed, rng), timed, rng)  # type: ignore[arg-type]


def play(seed, directory):
    run, broken = drawn(seed), []
    world, situation, grace_s = run.world, run.situation, run.timed.settings.run.stall_s
    run.begin()
    warm = 0 if situation is Situation.NO_ENGINE else run.rng.randrange(6, 12)
    while world.version < warm and run.timed.now < RELIEF_S:
        run.second()
    output = run.fall()
    onset, stood_since, version = run.timed.now, run.timed.now, world.version
    run.timed.records.clear()
    while run.timed.now < onset + STANDSTILL_S:
        run.second()
        if world.version != version:
            version, stood_since = world.version, run.timed.now
    stood_s = run.timed.now - stood_since
    stalls = [record.fields for record in run.timed.records if record.kind == "stalled"]
    if situation is Situation.NO_ROOM:
        if situation.value not in output or stood_s > STANDSTILL_S / 2:
            broken.append(
                f"a step that has no room must be refused at once and the run must continue, it printed {output!r}"
            )
    elif stood_s < STANDSTILL_S - 150:
        broken.append(f"{situation.name}: a step was made {stood_s:.0f} s before the end of the standstill")
    elif len(stalls) != 1 or not grace_s < stalls[0]["still_s"] <= grace_s + 2:
        broken.append(f"{situation.name}: the watchdog must speak once, after {grace_s:.0f} s: {stalls}")
    elif situation.value not in stalls[0]["waits_for"]:
        broken.append(f"{situation.name}: expected {situation.value!r} in {stalls[0]['waits_for']!r}")
    run.relieve()
    eased = run.timed.now
    while world.version < version + 5 and run.timed.now < eased + RELIEF_S:
        run.second()
    if world.version < version + 5:
        broken.append(f"{situation.name}: it did not get on again; it waits for {waits(run)}")
    figures = {"situations": 1, "hung": int("get on" in "".join(broken)), "named wrongly": len(broken)}
    return Verdict(figures, tuple(broken))


def waits(run):
    from pipelinerl.controller.decisions.giving_up import waiting_for

    return waiting_for(run.timed.state, now=run.timed.now)
