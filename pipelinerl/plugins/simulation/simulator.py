"""`simulate`: a run of a `SimulatedSetting` on a `Hardware`, from the first ordered group to the last step.

    controller   orders groups within its bounds      the real controller's `StalenessBounds`, `FilteredShare`
    actors       request, judge, deliver              `actors.py`
    engines      decode, load new weights             `engine.py`
    trainer      takes the oldest fresh groups        `engine.py`, `actors.py`
    publication  overlaps with the next step          like `training/publishing.py`

A step ends only after the publication that runs during it. Then the step is reported, the controller orders groups and
decides whether engines reload (`reload_due`), and the trainer begins to publish and collects its next groups. The new
version counts as loaded once all engines have switched to it. The result depends only on the arguments.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from pipelinerl import rng
from pipelinerl.actor.freshness import can_be_fresh
from pipelinerl.controller.state.issued_ledger import FilteredShare
from pipelinerl.controller.state.lag import LagRule, StepFigures, Turns, largest_j, taught
from pipelinerl.objective.tokens import LAG_LOSS
from pipelinerl.observability.status import LedgerStatus
from pipelinerl.plugins.simulation.actors import Agenda, SimulatedActors, SimulatedTrainer
from pipelinerl.plugins.simulation.engine import SimulatedEngine, SimulatedGroup, WaitingGroups
from pipelinerl.plugins.simulation.hardware import Contention, Hardware
from pipelinerl.plugins.simulation.prediction import FILLS, Prediction, SimulatedStep, cost, staleness_of
from pipelinerl.plugins.simulation.setting import Shift, SimulatedSetting, drawing
from pipelinerl.staleness import LOCKSTEP, StalenessBounds

#: Interval in seconds at which actors poll the current version (`REFRESH_S` of the actor's role).
POLL_S: Final = 0.5


@dataclass(slots=True)
class _Counts:
    issued: int = 0
    trained: int = 0
    filtered: int = 0
    stale: int = 0
    failed: int = 0
    area: float = 0.0
    """Integral of the orders in flight over time."""
    since: float = 0.0
    ended: int = 0
    ended_after: float = 0.0
    """Sum of the times from the order for a group to its outcome."""
    ended_tokens: int = 0
    stale_tokens: int = 0

    @property
    def in_flight(self) -> int:
        return self.issued - self.trained - self.filtered - self.stale - self.failed

    def until(self, now: float) -> None:
        """Advance the integral `area` to time `now`; call this before each change of the number of orders in flight."""
        self.area += self.in_flight * (now - self.since)
        self.since = now


class _Mark(NamedTuple):
    steps: int
    at: float
    busy_s: float
    decode_steps: int
    row_steps: int
    counts: _Counts


def simulate(setting: SimulatedSetting, hardware: Hardware) -> Prediction:
    """Simulate a run. Raises ValueError if the run deadlocks: no event is left before its last step."""
    run = _Run(setting, hardware)
    run.to_its_end()
    return run.prediction()


#: Trains on a step's groups and returns the effective sample size of their weights; groups know their `versions`.
Learner = Callable[[Sequence[SimulatedGroup]], float]


def simulated_steps(
    setting: SimulatedSetting, hardware: Hardware, learner: Learner | None = None
) -> Sequence[SimulatedStep]:
    """Return every step of a simulated run, in order. Raises ValueError if the run deadlocks.

    A `learner` makes each step a real one, of which only the time is simulated. It then shows the run what lag costs.
    """
    run = _Run(setting, hardware, learner)
    run.to_its_end()
    return run.steps


class _Run:
    def __init__(self, setting: SimulatedSetting, hardware: Hardware, learner: Learner | None = None) -> None:
        self._learner, self._ess = learner, None if learner is None else 1.0
        self._setting, self._hardware, self._control = setting, hardware, hardware.control
        self._agenda = agenda = Agenda()
        self._engines = [
            SimulatedEngine(
                hardware.engine, setting.slots, setting.on_update, hardware.update.pause_s, setting.prompt_tokens
            )
            for _ in range(setting.engines)
        ]
        self._actors = SimulatedActors(
            agenda,
            hardware.control,
            count=setting.actors,
            places=setting.actors * setting.groups_in_flight,
            engines=setting.engines,
            sample=self._sample,
            deliver=self._delivered,
        )
        self._trainer = SimulatedTrainer(agenda, self._computed)
        self._lengths = drawing(setting.lengths, setting.seed)
        self._longer = 1.0
        self._chance = rng.generator(setting.seed, "simulation", "filtered")
        # state of the simulated controller
        self._counts, self._filtered_share, self._lag = _Counts(), FilteredShare(), LagRule()
        if self._may_take_turns:
            self._lag.turns = Turns.first()
        self._version = self._loaded = self._waiting_groups = self._filtered_since_step = 0
        self._left_over = 0
        self._queued = self._least_queued = 0
        # state of the simulated actors: groups that they requested since they last polled the version, and older groups
        # by the first version that they polled after requesting the group
        self._requested: list[SimulatedGroup] = []
        self._by_polled_version: dict[int, list[SimulatedGroup]] = {}
        # state of the simulated trainer
        self._groups, self._batch = WaitingGroups(), list[SimulatedGroup]()
        self._collects_since: float | None = 0.0
        self._wait_s = self._computes_since = 0.0
        self._held_since: float | None = None
        self._made = self._publishing = self._to_commit = 0
        self._busy_engines = 0
        # seconds of busy processors since the last step was reported, as a share of all processors
        self._busy_s = self._busy_since = self._counted_at = 0.0
        self.steps: list[SimulatedStep] = []
        self._marked = self._mark()

    def to_its_end(self) -> None:
        """Process events until the last step has ended."""
        skipped = self._setting.steps // FILLS
        self._issue()
        while len(self.steps) < self._setting.steps:
            taken = len(self.steps)
            if not self._agenda.step():
                raise ValueError(
                    f"the simulated run is deadlocked at step {taken + 1} of {self._setting.steps}: "
                    f"{self._counts.in_flight} orders are in flight, {len(self._groups)} groups wait, no event is left"
                )
            if taken < skipped == len(self.steps):
                self._marked = self._mark()

    # --- controller ------------------------------------------------------------------------------------------------

    def _issue(self) -> None:
        setting, counts = self._setting, self._counts
        while counts.in_flight < setting.max_groups and self._bounds.may_issue(
            current=self._version,
            loaded=self._loaded,
            queued=setting.group_size
            * self._filtered_share.expected(counts.in_flight, waiting=self._waiting_groups, most=setting.oversample),
            per_step=setting.rollouts_per_step,
            sampled_at_once=setting.sampled_at_once,
            ahead=setting.steps_ahead or self._lag.ahead,
        ):
            now, size = self._agenda.now, setting.group_size
            counts.until(now)
            lengths = [max(1, round(length * self._longer)) for length in self._lengths(size)]
            group = SimulatedGroup(counts.issued, size, lengths, now, left=size)
            counts.issued += 1
            self._queued += size
            self._agenda.after(self._control.order_s, self._actors.order, group)

    @property
    def _bounds(self) -> StalenessBounds:
        setting, lag = self._setting, self._lag
        if not setting.auto_j:
            return setting.bounds
        return StalenessBounds(1 if lag.turns.are_taken else lag.j, setting.bounds.k)

    def _ended(self, groups: Sequence[SimulatedGroup]) -> None:
        now, counts = self._agenda.now, self._counts
        counts.until(now)
        counts.ended += len(groups)
        counts.ended_after += sum(now - group.issued_at for group in groups)

    def _stale(self, groups: Sequence[SimulatedGroup]) -> None:
        self._ended(groups)
        self._counts.stale += len(groups)

    def _step_reported(self) -> None:
        trained, self._batch = self._batch, []
        self._ended(trained)
        self._counts.trained += len(trained)
        self._stale(self._dropped())
        self._filtered_share.note_step(trained=len(trained), filtered=self._filtered_since_step)
        self._filtered_since_step = 0
        self._version += 1
        self._waiting_groups = len(self._groups)
        self._note_lag()
        self._least_queued = self._queued
        self._agenda.at(math.ceil(self._agenda.now / POLL_S) * POLL_S, self._give_up_outdated)
        due = self._bounds.reload_due(current=self._version, loaded=self._loaded)
        self._issue()
        self._agenda.after(self._control.report_s / 2, self._directed, due)

    def _note_lag(self) -> None:
        setting, step = self._setting, self.steps[-1]
        if setting.shift is not None and setting.shift.step == len(self.steps):
            self._apply(setting.shift)
        most = setting.bounds.most_in_flight(
            current=0, loaded=0, per_step=setting.rollouts_per_step, sampled_at_once=setting.sampled_at_once
        )
        step_s, ages = max(step.compute_s + step.publish_wait_s, 1e-9), step.staleness
        age = sum(age * count for age, count in ages.items()) / sum(ages.values())
        squared = sum(count * (age - 1) ** 2 for age, count in ages.items()) / sum(ages.values())
        cost, ess = setting.lag_cost, self._ess
        if ess is None and cost is not None:
            ess = 1 / (1 + cost * squared / (2 * LAG_LOSS))
        figures = StepFigures(
            waited=step.wait_s / step_s,
            held=step.publish_wait_s / step_s,
            left_over=self._left_over * setting.group_size / setting.rollouts_per_step,
            queued=self._least_queued / setting.rollouts_per_step,
            ess=ess,
            age=age,
            lag_rms=math.sqrt(squared),
            seconds=step.ended - (self.steps[-2].ended if len(self.steps) > 1 else 0.0),
            busy=self._busy_share() if self._may_take_turns else None,
        )
        most_j = largest_j(setting.bounds.k) if setting.auto_j else 1
        had_all = self._has_all_processors
        self._lag.note_step(
            figures, most=most / setting.rollouts_per_step, most_j=most_j, loss=LAG_LOSS * setting.misjudged
        )
        if self._has_all_processors != had_all:
            self._slow_trainer()
            self._slow_engines()

    def _apply(self, shift: Shift) -> None:
        """Change the run's conditions; groups on lost engines are requested again from the others."""
        self._longer = shift.lengths
        times = self._hardware.trainer
        self._hardware = replace(
            self._hardware,
            trainer=replace(
                times,
                token_s=times.token_s * shift.trainer,
                optimizer_step_s=times.optimizer_step_s * shift.trainer,
            ),
        )
        kept = len(self._engines) - int(shift.lost_engines * len(self._engines))
        for place, engine in enumerate(self._engines[kept:], start=kept):
            self._actors.lose(place)
            for group in engine.groups():
                self._queued += group.started
                engine.withdraw(group, self._agenda.now)
                group.left, group.oldest, group.versions = group.size, -1, {}
                self._actors.again(group)
            self._plan(place)

    def _published(self) -> None:
        self._loaded = self._publishing
        self._publishing = 0
        self._issue()
        if self._held_since is not None:
            self._step_ended()

    # --- actors and engines ----------------------------------------------------------------------------------------

    def _sample(self, group: SimulatedGroup) -> None:
        group.polled_version = -1
        self._requested.append(group)
        self._engines[group.place].submit(group)
        self._plan(group.place)

    def _plan(self, place: int) -> None:
        engine = self._engines[place]
        when = engine.plan(self._agenda.now)
        if when is not None:
            self._agenda.at(when, self._fire, place, engine.stamp)

    def _fire(self, place: int, stamp: int) -> None:
        engine = self._engines[place]
        if stamp != engine.stamp:
            return
        was_busy, begun = engine.is_busy, engine.begun
        self._count_busy()
        news = engine.fire(self._agenda.now)
        self._queued -= engine.begun - begun
        self._least_queued = min(self._least_queued, self._queued)
        self._plan(place)
        if engine.is_busy != was_busy:
            self._busy_engines += 1 if engine.is_busy else -1
            self._slow_trainer()
        if news is None:
            return
        for group in news.ended:
            self._actors.answered(group)
        for group in news.aborted:
            group.attempts += 1
            if group.attempts < self._setting.attempts:
                self._queued += group.left
                self._actors.again(group)
            else:
                self._actors.gave_up(group)
                self._ended([group])
                self._counts.failed += 1
                self._issue()
        if news.committed is not None:
            self._to_commit -= 1
            if self._to_commit == 0:
                self._agenda.after(self._hardware.update.pause_s, self._published)

    def _delivered(self, group: SimulatedGroup) -> None:
        if self._setting.filtered and self._chance.random() < self._setting.filtered:
            self._ended([group])
            self._counts.filtered += 1
            self._filtered_since_step += 1
            self._issue()
            return
        self._groups.offer(group)
        self._collect()

    def _give_up_outdated(self) -> None:
        """Cancel groups that have become too old to be trained on, as `Freshness` does in real actors."""
        # A group's version is the first one that its actor has polled after requesting the group.
        requested, self._requested = self._requested, []
        for group in requested:
            group.polled_version = self._version
        self._by_polled_version.setdefault(self._version, []).extend(requested)
        k = self._setting.bounds.k
        for version in [v for v in self._by_polled_version if not can_be_fresh(v, current=self._version, k=k)]:
            for group in self._by_polled_version.pop(version):
                # Skip groups that were requested again in the meantime.
                if group.polled_version == version and group.left and group.place >= 0:
                    self._queued -= group.size - group.started
                    self._engines[group.place].withdraw(group, self._agenda.now)
                    self._plan(group.place)
                    self._actors.gave_up(group)
                    self._stale([group])
        self._issue()

    # --- trainer ---------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        if self._collects_since is None:
            return
        setting, now = self._setting, self._agenda.now
        batch = self._groups.take(setting.rollouts_per_step, producing=self._made + 1, bounds=setting.bounds)
        if batch is None:
            if self._groups.dropped:
                self._stale(self._dropped())
                self._issue()
            return
        self._wait_s, self._collects_since, self._computes_since = now - self._collects_since, None, now
        self._batch, self._left_over = batch, len(self._groups)
        tokens = sum(group.tokens + setting.prompt_tokens * group.size for group in batch)
        times = self._hardware.trainer
        self._count_busy()
        self._trainer.begin(times.step_s(tokens, epochs=setting.epochs, optimizer_steps=setting.optimizer_steps))
        self._slow_trainer()
        self._slow_engines()

    def _dropped(self) -> list[SimulatedGroup]:
        dropped, self._groups.dropped = self._groups.dropped, []
        stale_tokens = sum(group.tokens for group in dropped)
        self._counts.stale_tokens += stale_tokens
        self._counts.ended_tokens += stale_tokens
        return dropped

    def _computed(self) -> None:
        self._count_busy()
        self._trainer.is_computing = False
        self._slow_engines()
        self._held_since = self._agenda.now
        if not self._publishing:
            self._step_ended()

    def _step_ended(self) -> None:
        now, computed = self._agenda.now, self._held_since or 0.0
        self._held_since = None
        self._made += 1
        ages: Counter[int] = Counter()
        for group in self._batch:
            ages.update({self._made - version: answers for version, answers in group.versions.items()})
        if self._learner is not None:
            self._ess = self._learner(self._batch)
        tokens = sum(group.tokens for group in self._batch)
        self._counts.ended_tokens += tokens
        rollouts, cost = ages.total(), self._setting.lag_cost or 0.0
        self.steps.append(
            SimulatedStep(
                ended=now,
                rollouts=sum(group.size for group in self._batch),
                sampled_tokens=tokens,
                wait_s=self._wait_s,
                compute_s=computed - self._computes_since,
                publish_wait_s=now - computed,
                staleness=+ages,
                learning=sum(n * taught(age - 1, cost) for age, n in ages.items()) / rollouts,
            )
        )
        self._agenda.after(self._control.report_s / 2, self._step_reported)

    def _directed(self, publish: bool) -> None:
        if publish:
            self._publishing = self._made
            self._agenda.after(self._hardware.update.send_s, self._commit)
        self._collects_since = self._agenda.now
        self._collect()

    def _commit(self) -> None:
        self._to_commit = len(self._engines)
        for place, engine in enumerate(self._engines):
            engine.commit(self._publishing)
            self._plan(place)

    # --- shared processors -----------------------------------------------------------------------------------------

    @property
    def _may_take_turns(self) -> bool:
        return self._setting.auto_j and self._hardware.contention != Contention()

    @property
    def _has_all_processors(self) -> bool:
        """True if engines and trainer take turns, so that each has all processors while it computes."""
        return self._setting.bounds.k == LOCKSTEP or (self._lag.turns.are_taken and self._lag.turns.have_begun)

    def _slowness(self) -> tuple[float, float]:
        """Return the factors by which engines and trainer are slower now than with all processors."""
        factors = self._hardware.contention
        apart = factors.apart and not self._has_all_processors
        engine = factors.engine if apart or self._trainer.is_computing else 1.0
        return engine, factors.trainer if apart or self._busy_engines else 1.0

    def _count_busy(self) -> None:
        """Add the time since the last call to the seconds of busy processors; call this before anything changes."""
        now, (engine, trainer) = self._agenda.now, self._slowness()
        share = self._busy_engines / len(self._engines) / engine + self._trainer.is_computing / trainer
        self._busy_s += (now - self._busy_since) * share
        self._busy_since = now

    def _busy_share(self) -> float:
        """Return the share of the processors that were busy since the last call."""
        self._count_busy()
        seconds, self._counted_at = self._agenda.now - self._counted_at, self._agenda.now
        share, self._busy_s = self._busy_s / max(seconds, 1e-9), 0.0
        return share

    def _slow_trainer(self) -> None:
        self._trainer.slow(self._slowness()[1])

    def _slow_engines(self) -> None:
        if self._hardware.contention.engine == 1.0:
            return
        factor = self._slowness()[0]
        for place, engine in enumerate(self._engines):
            engine.slow(factor, self._agenda.now)
            self._plan(place)

    # --- figures ---------------------------------------------------------------------------------------------------

    def _mark(self) -> _Mark:
        now = self._agenda.now
        self._counts.until(now)
        return _Mark(
            steps=len(self.steps),
            at=now,
            busy_s=sum(engine.busy_until(now) for engine in self._engines),
            decode_steps=sum(engine.decode_steps for engine in self._engines),
            row_steps=sum(engine.row_steps for engine in self._engines),
            counts=replace(self._counts),
        )

    def prediction(self) -> Prediction:
        """Return the results of the steps after the pipeline has filled."""
        first, last = self._marked, self._mark()
        before, counts = first.counts, last.counts
        steps, seconds = self.steps[first.steps :], last.at - first.at
        tokens, rollouts = sum(s.sampled_tokens for s in steps), sum(s.rollouts for s in steps)
        decode_steps, ended = last.decode_steps - first.decode_steps, counts.ended - before.ended
        ages = staleness_of(steps)
        tokens_per_s = tokens / seconds
        return Prediction(
            steps=len(self.steps),
            skipped=first.steps,
            seconds=last.at,
            tokens_per_s=tokens_per_s,
            rollouts_per_s=rollouts / seconds,
            steps_per_hour=3600 * len(steps) / seconds,
            step_s=seconds / len(steps),
            trainer_wait=sum(s.wait_s for s in steps) / seconds,
            trainer_computes=sum(s.compute_s for s in steps) / seconds,
            trainer_held=sum(s.publish_wait_s for s in steps) / seconds,
            engine_idle=max(0.0, 1 - (last.busy_s - first.busy_s) / (seconds * len(self._engines))),
            rows=(last.row_steps - first.row_steps) / decode_steps if decode_steps else 0.0,
            staleness=ages,
            staleness_mean=sum(age * share for age, share in ages.items()),
            discarded=(counts.stale_tokens - before.stale_tokens) / max(1, counts.ended_tokens - before.ended_tokens),
            learning=sum(s.learning for s in steps) / len(steps),
            ahead=self._setting.steps_ahead or self._lag.ahead,
            j=self._bounds.j,
            mean_length=tokens / rollouts,
            order_s=(counts.ended_after - before.ended_after) / ended if ended else 0.0,
            in_flight=(counts.area - before.area) / seconds,
            account=LedgerStatus(
                issued=counts.issued,
                trained=counts.trained,
                filtered=counts.filtered,
                stale=counts.stale,
                failed=counts.failed,
                in_flight=counts.in_flight,
            ),
            **cost(
                self._hardware.prices,
                engines=len(self._engines),
                step_s=seconds / len(steps),
                tokens_per_s=tokens_per_s,
            ),
        )
