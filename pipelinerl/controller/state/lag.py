"""`LagRule`: chooses the lag that pacing holds, and j, on the live run, so that each version of lag pays for itself.

Lag lets the trainer wait less, and makes what it trains on older. The rule compares both after every step:

    trainer's wait ÷ step      measured                      what one more version of lag could gain
    price p of a version       from the effective sample     what one more version of lag loses, as a share of the
                               size (ESS) and the lag        step's learning

The steps of an optimizer with momentum go in about the same direction, so log-ratios grow with the lag, and the
variance 1 / ESS − 1 of the importance weights with its square: in runs of `tiny` and of a bigram model, with the power
1.7 to 2.1 for lags of 1 to 4. What is lost grows as it does: the rule takes it that a step teaches 1 / (1 + c lag² / 2)
of what it would teach on policy, where c lag² / 2 = κ (1 / ESS − 1).

Where engines and trainer share the processors of one machine, lag has a rival: they take turns on policy, each with all
processors (`Turns`).

It is pure arithmetic on the steps' figures, so the journal and checkpoints restore it.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

#: The least price of one more version of lag, as a share of a step: waits below it are left alone.
LEAST_PRICE: Final = 0.03
#: The cost c of lag (`LagRule.cost`) before any step has shown it. Runs of `tiny` under clipped ratios show 0.02 to
#: 0.07 in their first hundred steps, and less at their end.
USUAL_COST: Final = 0.02
#: A step counts as at most this many times the cost so far: 1 / ESS has no bound, and a few tokens can decide it.
_SURPRISING: Final = 3.0
#: Observed steps before the lag grows, and before it shrinks or j changes.
_STEPS_TO_GROW: Final = 2
_STEPS_TO_SHRINK: Final = 4
#: Weight of the newest step in means over steps, whose half-life is eight steps.
_NEWEST: Final = 1 - 0.5 ** (1 / 8)
#: Why a run whose objective cannot price lag is on policy, unless the user sets j.
UNPRICED: Final = (
    "on policy: nothing in the objective corrects for lag or shows what it costs; to allow lag, use importance weights "
    "(objective ppo_tis or cispo, say), or set staleness.j"
)
#: A shrinks by this share of its distance to `too_few`, unless that is less than `_CLOSE`.
_NARROWED: Final = 1 / 3
_CLOSE: Final = 0.35
#: How far `too_few` falls whenever it keeps A from shrinking where lag is dear, and for each step's groups left over.
_FORGOTTEN: Final = 0.005
_DOUBTED: Final = 0.25
#: Steps that `Turns` looks at before it judges a way, and before it judges one that is clearly faster or slower.
_STEPS_TO_KNOW: Final = 8
_STEPS_TO_TRY: Final = 3
#: A way is clearly faster if it takes less than this share of the other's seconds.
_CLEARLY: Final = 0.85
#: The other way is tried if it promises to take less than this share of the seconds.
_PROMISING: Final = 0.95
#: A trial ends at once with a step that takes this many times the seconds of the way before.
_HOPELESS: Final = 2.0
#: Share that the expected seconds of the other way lose with each step, so that it is tried again one day.
_HOPE: Final = 0.001
#: The largest j that the rule chooses.
_MOST_J: Final = 4


def largest_j(k: float) -> int:
    """Return the largest j that the rule may choose with the staleness bound k."""
    return int(max(1, min(_MOST_J, k // 2)))


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one step that the rule reads; waits are divided by the step's duration.

    Attributes:
        waited: the trainer's wait for rollouts.
        held: the trainer's wait for a publication to end.
        left_over: complete groups that the step left over, divided by the groups per step.
        queued: the fewest rollouts at any time that no engine had begun, since this was last known, divided by those of
            a step; None if unknown, as after most steps that are shorter than the interval at which engines are asked.
        ess: effective sample size of the step's importance weights, from 0 to 1; None without such weights.
        age: mean staleness of the step's rollouts in versions, 1 on policy; None if unknown.
        lag_rms: root of the mean of (staleness − 1)², in versions; None if unknown.
        sampling: the time from an order to its judged answers; 0 if unknown.
        seconds: the time since the step before; 0 if unknown.
        busy: the share of the processors that were busy, with any program; None unless engines and trainer share them.
    """

    waited: float
    held: float = 0.0
    left_over: float = 0.0
    queued: float | None = 0.0
    ess: float | None = None
    age: float | None = None
    lag_rms: float | None = None
    sampling: float = 0.0
    seconds: float = 0.0
    busy: float | None = None


class Turns(msgspec.Struct, kw_only=True):
    """Chooses, on shared processors, between turns and lag.

    Engines and trainer take turns on policy, each with all processors; or they work at the same time, each on its own
    processors. The other way is tried while it promises fewer seconds, and kept if it takes fewer. Before its first
    trial, it promises a step that keeps all processors busy: 7 s if a step takes 10 s and 30 % of them are idle. A
    trial then shows how far that is from the truth. Seconds are divided by what a step teaches, so lag pays its cost.
    """

    are_taken: bool = False
    """True while engines and trainer take turns; else they work at the same time."""
    have_begun: bool = True
    """False while turns have begun and older rollouts are trained: until then each has its own processors only."""
    seen: list[tuple[float, float]] = []
    """For each of the last steps: its seconds, and the least seconds that the other way could take."""
    skips: int = 1
    """The steps that are not looked at, since a change takes effect during them."""
    before: tuple[float, float] | None = None
    """During a trial, seconds of the way before, and what were then the least seconds of this way."""
    factor: float = 1.0
    """Expected seconds of the other way, divided by those of a step that keeps all processors busy."""

    @classmethod
    def first(cls) -> Turns:
        """Return the state of a run that begins with turns and then tries lag in any case."""
        return cls(are_taken=True, factor=0.0)

    @property
    def seconds(self) -> float:
        """Mean seconds of a step; 0 if unknown."""
        return _mean([seconds for seconds, _ in self.seen])

    @property
    def least_s(self) -> float:
        """Least mean seconds of a step of the other way; 0 if unknown."""
        return _mean([least for _, least in self.seen])

    def note_step(self, step: StepFigures, *, taught: float, grows: bool) -> None:
        """Compare both ways after a step that taught the share `taught`; a lag that `grows` is not judged yet."""
        if step.busy is None or step.seconds <= 0:
            return
        if self.are_taken and not self.have_begun:
            self.have_begun = step.age is not None and step.age <= 1
            return
        seconds = step.seconds / taught
        if self.are_taken and self.before is not None and seconds > _HOPELESS * self.before[0]:
            self._change(factor=seconds / self.before[1])
            return
        if self.skips > 0:
            self.skips -= 1
            return
        self.factor *= 1 - _HOPE
        self.seen = [*self.seen, (seconds, step.seconds * step.busy)][-_STEPS_TO_KNOW:]
        if self.before is not None:
            self._judge(*self.before, grows=grows)
        elif self.are_taken or not grows:
            promise = self.factor * self.least_s / self.seconds
            enough = _STEPS_TO_TRY if self.are_taken else _STEPS_TO_KNOW
            if promise < _PROMISING and (len(self.seen) >= enough or (self.are_taken and step.busy < 0.5)):
                before = self.seconds, self.least_s
                self._change()
                self.before = before

    def _judge(self, before_s: float, least_s: float, *, grows: bool) -> None:
        """End a trial if it shows which way is faster."""
        steps, ratio = len(self.seen), self.seconds / before_s
        if steps < _STEPS_TO_TRY or (steps < _STEPS_TO_KNOW and _CLEARLY < ratio < 1 / _CLEARLY):
            return
        if ratio < 1:
            self.before, self.factor = None, before_s / self.least_s
        elif self.are_taken or not grows:
            self._change(factor=self.seconds / least_s)

    def _change(self, *, factor: float = 1.0) -> None:
        self.are_taken = not self.are_taken
        self.have_begun, self.skips = not self.are_taken, 2
        self.seen, self.before, self.factor = [], None, factor


class LagRule(msgspec.Struct, kw_only=True):
    """The number A of steps whose rollouts are kept in flight, and j: as many as pay for themselves.

    The least A is two: the step that trains and the next one. After each change, the orders that it caused need about A
    steps to be trained, so the rule rests for 0.8 A steps and then looks at new ones:

        queue longer than ¾ of a step                A shrinks: orders would only age, whichever part is slow later
        trainer waits for more than the price p      A − 1 grows by the excess, unless orders queue in engines
        groups left over in each of four steps       A shrinks by the fewest, but not to the last A with long waits
        waits below ¾ p where lag is dear            A shrinks by a third of the way to the last A with long waits
        trainer waits longer after A has shrunk      A returns to what it was
        publications hold the trainer                j grows while a rarer publication gains more than half a version

    The price is p = c lag / (1 + c lag² / 2), what one more version of lag costs as a share of what a step teaches.
    """

    steps: float = 3.0
    """A: the number of steps whose rollouts are in flight."""
    j: int = 1
    """The versions between two publications."""
    too_few: float = 0.0
    """The last A with which the trainer waited too long: A does not come close to it."""
    enough: float = 0.0
    """After A has shrunk, what it was before; 0 after other changes."""
    cost: float = USUAL_COST
    """c: the share of a step's learning that one more version of lag costs, at a lag of one version."""
    priced: int = 0
    """The steps that have shown c. The first ones count more, since nothing is known before."""
    mismatch: float = 0.0
    """1 / ESS − 1 on policy, where only rounding in engines and trainer differs: it is not the lag's."""
    share: float = 1.0
    """The root mean square of the rollouts' lag, divided by `lag`: less than 1 if most are sampled in less time."""
    rest: int = 0
    """Steps that are not looked at, since their orders were issued before the last change."""
    seen: list[StepFigures] = []
    """The observed steps since the last change or the last four steps without one."""
    is_cold: bool = True
    """True until four steps in a row gave no reason to grow."""
    any_trained: bool = False
    """True once the current trainer has taken a step."""
    usual: StepFigures | None = None
    """Means of waits, age and sampling over the last steps, for `why`."""
    is_bound: bool = False
    """True if k, or what actors can hold, allows less lag than would pay."""
    turns: Turns = msgspec.field(default_factory=Turns)

    @property
    def ahead(self) -> float:
        """The number of steps whose rollouts are to be in flight: A, or one while engines and trainer take turns."""
        return 1.0 if self.turns.are_taken else self.steps

    @property
    def lag(self) -> float:
        """The lag of a rollout in versions that is sampled for as long as A steps take."""
        return self.steps - 1 + (self.j - 1) / 2

    @property
    def price(self) -> float:
        """The share of a step that the trainer may wait before one more step in flight pays."""
        cost = self.cost * self.share**2
        return max(LEAST_PRICE, cost * self.lag * taught(self.lag, cost))

    def pause(self) -> None:
        """Ignore a step, and the one after it, because something other than lag decides how long the trainer waits."""
        self.rest, self.seen = max(self.rest, 1), []
        self.turns.skips = max(self.turns.skips, 1)

    def note_step(self, step: StepFigures, *, most: float, most_j: int, loss: float) -> None:
        """Adapt A, at most to `most`, and j, at most to `most_j`, after a step.

        `loss` is κ (`PolicyObjective.lag_loss`).
        """
        self._price(step, loss)
        if not self.any_trained:  # the first step waited for everything to start
            self.any_trained = True
            return
        self.usual = step if self.usual is None else _nearer(self.usual, step)
        took_turns = self.turns.are_taken
        self.turns.note_step(step, taught=taught(step.lag_rms or 0.0, self.cost), grows=self.is_cold)
        if took_turns or self.turns.are_taken:
            self.rest, self.seen = 1, []
            return
        if self.rest > 0:
            self.rest -= 1
            return
        if step.lag_rms is not None:
            self.share += _NEWEST * (min(1.0, step.lag_rms / self.lag) - self.share)
        self.seen.append(step)
        before = self.steps, self.j
        self._adapt()
        wanted = min(self.steps, _most_steps(self.cost * self.share**2))
        self.steps = max(2.0, min(wanted, most))
        self.is_bound = wanted > most
        self.j = max(1, min(self.j, most_j))
        if (self.steps, self.j) != before:
            # Orders in flight before a change are trained within as many steps as the larger A.
            self.rest, self.seen = math.ceil(0.8 * max(self.steps, before[0])), []

    def why(self, *, j: int | None, is_priced: bool = True) -> str:
        """Return a sentence for users: the lag, what it gains and costs, and why j is what it is; "" if not known yet.

        `j` is the user's, None if the rule chooses it. Without lag, the trainer waits for all answers of each step.
        Unless the objective corrects for lag (`is_priced`), its cost is unknown.
        """
        if self.usual is None or self.usual.age is None:
            return ""
        usual, lag, turns = self.usual, self.usual.age - 1, self.turns
        learns = taught(self.share * self.lag, self.cost)
        if turns.are_taken:
            lagging = turns.factor * turns.least_s
            than = f": a step takes {turns.seconds:.2g} s, with lag {lagging:.2g} s" if lagging and j is None else ""
            return f"on policy: engines and trainer take turns, each with all processors{than}"
        alone = usual.sampling or lag
        gain = max(0.0, alone / (1 + alone) - usual.waited / (1 + usual.waited))
        bound = ", and k or groups_in_flight allows no more" if self.is_bound else ""
        every = self.j * usual.held
        reason = f"a publication holds the trainer for {every:.0%} of a step" if j is None else "set by the user"
        cost = f"it costs {1 - learns:.0%} of what a step teaches" if is_priced else "nothing shows what it costs"
        return (
            f"lag {usual.age:.1f}: the trainer would wait {gain:.0%} more without it, and {cost}{bound}; "
            f"j = {j or self.j}: {reason}"
        )

    def _price(self, step: StepFigures, loss: float) -> None:
        if step.ess is None or step.lag_rms is None:
            if self.priced == 0:
                self.cost = 0.0  # the objective shows no cost, so that only the least price is certain
            return
        variance = 1 / max(step.ess, 0.05) - 1
        if step.lag_rms == 0:
            self.mismatch = variance
        elif step.lag_rms > 0.2:
            cost = 2 * loss * max(0.0, variance - self.mismatch) / max(step.lag_rms, 0.5) ** 2
            cost = min(cost, _SURPRISING * max(self.cost, USUAL_COST))
            self.priced += 1
            self.cost += max(_NEWEST, 1 / (self.priced + 1)) * (cost - self.cost)

    def _adapt(self) -> None:
        number, price = len(self.seen), self.price
        wait = sum(min(each.waited, 2.0) for each in self.seen) / number
        queued = next((each.queued for each in reversed(self.seen) if each.queued is not None), None)
        if queued is None and wait > price:
            return  # it decides whether A should grow
        if queued is not None and queued > 0.75:
            self.steps, self.enough = self.steps - min(0.5, queued - 0.5), 0.0
        elif queued is not None and wait > price and queued <= 0.25 and number >= _STEPS_TO_GROW:
            grown = 1 + (self.steps - 1) * (1 + min(1.0, wait - price))
            self.too_few, self.steps, self.enough = self.steps, self.enough or grown, 0.0
        elif number >= _STEPS_TO_SHRINK:
            self.is_cold = False
            left_over = min(each.left_over for each in self.seen)
            shrinks = min(left_over, max(0.0, self.steps - self.too_few - _CLOSE))
            self.too_few -= _DOUBTED * (left_over - shrinks)
            if price > LEAST_PRICE and wait < 0.75 * price:
                room = self.steps - max(2.0, self.too_few)
                if room < _CLOSE:
                    self.too_few -= _FORGOTTEN
                else:
                    shrinks = max(shrinks, _NARROWED * room)
            if shrinks > 0:
                self.steps, self.enough = self.steps - shrinks, self.steps
            self._choose_j(price)
            self.seen = []

    def _choose_j(self, price: float) -> None:
        # A publication holds the trainer for `held` seconds of every j-th step; one more version between publications
        # ages a rollout by half a version.
        every = self.j * sum(each.held for each in self.seen) / len(self.seen)
        if every * _rarer(self.j) > price / 2 + 0.005:
            self.j += 1
        elif self.j > 1 and every * _rarer(self.j - 1) < 0.35 * price:
            self.j -= 1


def taught(lag: float, cost: float) -> float:
    """Return what a step with this lag teaches, as a share of what it would teach on policy."""
    return 1 / (1 + cost * lag**2 / 2)


def _most_steps(cost: float) -> float:
    """Return the A with which a run would learn most, if its steps were A times as fast as with one in flight."""
    return max(2.0, math.sqrt(1 + 2 / cost)) if cost > 0 else math.inf


def _mean(seconds: list[float]) -> float:
    """Return the mean without the smallest and the largest, which may be a pause; of two or fewer, of all; else 0."""
    counted = sorted(seconds)[1:-1] or seconds
    return sum(counted) / len(counted) if counted else 0.0


def _rarer(j: int) -> float:
    """Return the share of a publication that each step saves with j + 1 instead of j."""
    return 1 / j - 1 / (j + 1)


def _nearer(mean: StepFigures, step: StepFigures) -> StepFigures:
    """Return `mean` moved towards `step` in the fields that `why` reads."""

    def moved(before: float, now: float) -> float:
        return before + _NEWEST * (now - before)

    return msgspec.structs.replace(
        mean,
        waited=moved(mean.waited, step.waited),
        held=moved(mean.held, step.held),
        age=step.age if mean.age is None or step.age is None else moved(mean.age, step.age),
        sampling=moved(mean.sampling, step.sampling)
        if mean.sampling and step.sampling
        else step.sampling or mean.sampling,
    )
