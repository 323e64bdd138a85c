"""Term (slot) `adv` of RLAX Eq. 3: advantages of sampled tokens, computed once on the whole batch.

Advantages that depend only on rewards are computed before packing; the others also need columns from forward passes,
such as the critic's values, and are computed after these passes. A rollout is judged if its verifier reached a verdict.
Unjudged rollouts are excluded from baselines and normalisation; their tokens have advantage 0.

In shapes, B is the number of rollouts in the batch, N the number of their sampled tokens, which are concatenated, and M
the number of their turns.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar, Final, Protocol

import numpy as np

from pipelinerl import rng
from pipelinerl.objective.reward import Bools, Floats, Ints, Parts, Roles, Scored, TurnReward, Turns
from pipelinerl.objective.tokens import column_of


class Advantage(Protocol):
    """An estimator of the advantages of sampled tokens; members with a body are defaults."""

    @property
    def needs(self) -> frozenset[str]:
        """Names of the optional columns, computed by forward passes, that the estimator reads, such as `values`."""
        return frozenset()

    @property
    def credit(self) -> Credit:
        """The rewards of an episode that count for a turn; `turns` if the estimator reads the rewards of turns."""
        return Credit.EPISODE

    @property
    def needs_parts(self) -> bool:
        return False

    @property
    def state(self) -> bool:
        """True if the estimator keeps a baseline for each role from step to step (`baselines`)."""
        return False

    @property
    def is_zero(self) -> bool:
        return False

    @property
    def uneven(self) -> str:
        """Why it cannot give a rollout one advantage, and what can; "" if all tokens of a rollout share one."""
        return ""

    def baselines(self, scored: Scored) -> dict[str, float]:
        """Return each role's baseline after a step; {} if the estimator has no `state`."""
        return {}

    def problems(self) -> Iterator[str]:
        yield from ()

    def without_effect(self, key: str, size: int) -> Iterator[str]:
        """Yield a sentence if it cannot work with groups of `size` rollouts, which the recipe sets as `key`."""
        yield from ()

    @property
    def formula(self) -> str: ...

    def advantages(self, scored: Scored, columns: Mapping[str, Floats]) -> Floats:
        """Return the advantage [N] of each sampled token; `columns` holds the columns named in `needs`, [N] each."""
        ...


class Baseline(StrEnum):
    """The quantity that is subtracted from a reward."""

    NONE = "none"
    MEAN = "mean"
    """Mean of the group's G rewards, as in RLAX. Reward − mean is (G − 1)/G times the value with `leave_one_out`."""
    LEAVE_ONE_OUT = "leave_one_out"
    """Mean of the group's other rollouts (Kool et al. 2019); unbiased. A single rollout has advantage 0."""


class Scale(StrEnum):
    """The quantity that divides the difference of reward and baseline."""

    NONE = "none"
    STD = "std"
    """Standard deviation of the group + `epsilon`, as in GRPO, with ddof 0; torch's default is ddof 1."""
    MEAN = "mean"
    """Mean of the group, for non-negative rewards (MaxRL); a group whose mean is 0 has advantages 0."""
    BATCH = "batch"
    """Deviation of reward − baseline over the batch's tokens, whose mean is also subtracted. REINFORCE++, Eq. 12."""


class Credit(StrEnum):
    """The rewards of an episode that count for a turn."""

    EPISODE = "episode"
    """All rewards of the episode: every token has the advantage of its rollout."""
    TURNS = "turns"
    """The rewards of the turn and of later turns, compared with the same turn in the group's other rollouts."""


_ONE_ADVANTAGE: Final = (
    "adv must give a sequence one advantage with a ratio of whole sequences (grad1): take group_relative"
)
_ONE_RETURN: Final = f"{_ONE_ADVANTAGE}, or reward_to_go with discount 1 and without kl"
_BY_EPISODE: Final = (
    "adv.credit must be episode with a ratio of whole sequences (grad1): its tokens share one advantage; "
    "take a ratio of tokens"
)


def _beyond_one(**factors: float) -> Iterator[str]:
    for name, factor in factors.items():
        if factor > 1.0:
            yield f"adv.{name} must be at most 1, got {factor}"


@dataclass(frozen=True, slots=True)
class GroupRelative(Advantage):
    """(R_i − baseline) / scale, both taken over the rollout's group. GRPO uses mean and std, Dr. GRPO only the mean.

    With `credit` turns, each turn k of rollout i has its own advantage: A_{i,k} = (G_{i,k} − baseline_{g,k}) /
    scale_{g,k}. G_{i,k} is the turn's reward-to-go (`Turns.rewards_to_go`); baseline and scale are computed over turn k
    of all rollouts in the group. With a mean as baseline, a turn that only one rollout has reached has advantage 0.
    """

    baseline: Baseline = Baseline.MEAN
    scale: Scale = Scale.STD
    epsilon: float = 1e-6
    credit: Credit = Credit.EPISODE

    @property
    def formula(self) -> str:
        if self.credit is Credit.TURNS:
            earned, others, group, end = "G_{i,k}", "G", ",k", _TO_GO
            mean, deviation = f"mean_{{g{group}}} {others}", f"std_{{g{group}}} {others}"
        else:
            earned, others, group, end, mean, deviation = "R_i", "R", "", "", "mean_g R", "std_g R"
        baselines = {
            Baseline.NONE: "",
            Baseline.MEAN: f" − {mean}",
            Baseline.LEAVE_ONE_OUT: f" − mean_{{g∖i{group}}} {others}",
        }
        difference = f"{earned}{baselines[self.baseline]}"
        if self.scale is Scale.BATCH:
            return f"whiten_batch({difference}){_DDOF}{end}"
        if self.scale is Scale.STD:
            return f"({difference}) / ({deviation} + {self.epsilon:g}){_DDOF}{end}"
        return (f"({difference}) / {mean}" if self.scale is Scale.MEAN else difference) + end

    @property
    def uneven(self) -> str:
        return _BY_EPISODE if self.credit is Credit.TURNS else ""

    def without_effect(self, key: str, size: int) -> Iterator[str]:
        if size == 1 and self.baseline is not Baseline.NONE:
            yield (
                f"adv.baseline {self.baseline} needs groups, and {key} is 1: every advantage would be 0; "
                'raise it, or take adv = "reward_to_go" or adv.baseline = "none" with adv.scale = "none"'
            )
        elif size == 1 and self.scale in (Scale.STD, Scale.MEAN):
            quotient = "the deviation of one reward is 0" if self.scale is Scale.STD else "a reward over itself is 1"
            yield (
                f"adv.scale {self.scale} needs groups, and {key} is 1: {quotient}; raise it, "
                'or take adv.scale = "batch" or "none"'
            )

    def advantages(self, scored: Scored, columns: Mapping[str, Floats]) -> Floats:
        if self.credit is Credit.TURNS and scored.turns is not None:
            scored = scored.by_turns(scored.turns)
        valid, known = scored.valid, scored.known
        _, index = np.unique(scored.groups, return_inverse=True)
        count = np.bincount(index, weights=valid.astype(np.float64), minlength=1)
        mean = np.bincount(index, weights=known, minlength=1) / np.maximum(count, 1.0)
        difference = np.where(valid, known - mean[index], 0.0)
        deviation = np.sqrt(np.bincount(index, weights=difference**2, minlength=1) / np.maximum(count, 1.0))
        if self.baseline is Baseline.NONE:
            difference = known
        elif self.baseline is Baseline.LEAVE_ONE_OUT:
            # Leave-one-out: R_i − (ΣR − R_i)/(n − 1) = n/(n − 1)·(R_i − mean); for n = 1 the difference is already 0.
            difference = difference * (count / np.maximum(count - 1.0, 1.0))[index]
        if self.scale is Scale.STD:
            difference = difference / (deviation[index] + self.epsilon)
        elif self.scale is Scale.MEAN:
            difference = np.divide(difference, mean[index], out=np.zeros_like(difference), where=mean[index] > 0)
        spread = np.repeat(difference, scored.lengths)
        return whitened(spread, scored.judged, self.epsilon) if self.scale is Scale.BATCH else spread


class Metric(StrEnum):
    """The measure that ranks the rollouts of a group."""

    SHORTEST = "shortest"
    """Fewest sampled tokens first."""
    TOKEN_EFFICIENCY = "token_efficiency"
    """Highest reward per sampled token first."""


@dataclass(frozen=True, slots=True)
class GroupFiltered(Advantage):
    """GFPO (Shrivastava et al. 2025 §3): only the best `keep` rollouts of each group train.

    The advantage is (R_i − mean_S R) / (std_S R + epsilon) for i in S, and 0 for all other rollouts. S are the `keep`
    judged rollouts of the group that `metric` ranks first, or all if there are fewer. Ties go to the earlier rollout.
    """

    keep: int = 8
    metric: Metric = Metric.SHORTEST
    epsilon: float = 1e-6
    credit: Credit = Credit.EPISODE

    @property
    def formula(self) -> str:
        by_turns, end = self.credit is Credit.TURNS, f",  S = the {self.keep} by {self.metric}{_DDOF}"
        earned, others, group = ("G_{i,k}", "G", "{S,k}") if by_turns else ("R_i", "R", "S")
        difference = f"{earned} − mean_{group} {others}"
        return f"1[i ∈ S]·({difference}) / (std_{group} {others} + {self.epsilon:g}){end}{_TO_GO if by_turns else ''}"

    @property
    def uneven(self) -> str:
        return _BY_EPISODE if self.credit is Credit.TURNS else ""

    def problems(self) -> Iterator[str]:
        if self.keep < 2:
            yield f"adv.keep must be at least 2, got {self.keep}: one rollout alone has no advantage"

    def without_effect(self, key: str, size: int) -> Iterator[str]:
        if self.keep >= size:
            yield (
                f"adv.keep ({self.keep}) must be below {key} ({size}): as it is every rollout of a group is "
                "kept, and nothing is filtered"
            )

    def advantages(self, scored: Scored, columns: Mapping[str, Floats]) -> Floats:
        lengths, shortest = scored.lengths, self.metric is Metric.SHORTEST
        preference = -lengths if shortest else scored.known / np.maximum(lengths, 1)
        kept = np.zeros(scored.valid.shape, dtype=bool)
        for group in np.unique(scored.groups):
            members = np.flatnonzero((scored.groups == group) & scored.valid)
            kept[members[np.argsort(-preference[members], kind="stable")[: self.keep]]] = True
        rule = GroupRelative(epsilon=self.epsilon, credit=self.credit)
        return rule.advantages(replace(scored, valid=kept), columns)


@dataclass(frozen=True, slots=True)
class Decoupled(Advantage):
    """GDPO (Liu et al. 2026, arXiv 2601.05242): each part of the reward is normalised separately.

    A_i = Σ_n w_n·(r_{i,n} − mean_g r_n) / (std_g r_n + epsilon), then normalised over the judged rollouts of the batch.
    r_{i,n} is part n of rollout i's reward, and w_n its weight in the reward. A rollout that lacks a part is excluded
    from this part's mean and deviation. With a single part, the result is GRPO's advantage, normalised over the batch.
    """

    needs_parts: ClassVar = True

    epsilon: float = 1e-6

    @property
    def formula(self) -> str:
        part = f"w_n·(r_{{i,n}} − mean_g r_n) / (std_g r_n + {self.epsilon:g})"
        return f"normalise_batch(Σ_n {part}){_DDOF}"

    def advantages(self, scored: Scored, columns: Mapping[str, Floats]) -> Floats:
        known, valid = scored.known, scored.valid
        parts = scored.parts or Parts(rewards=known[:, None], weights=np.ones((len(known), 1)))
        one_token = replace(scored, lengths=np.ones(len(known), np.int64))
        rule, total = GroupRelative(epsilon=self.epsilon), np.zeros(len(known))
        for earned, weights in zip(parts.rewards.T, parts.weights.T, strict=True):
            of_part = replace(one_token, rewards=earned, valid=valid & (weights != 0))
            total += weights * rule.advantages(of_part, columns)
        return np.repeat(whitened(total, valid, self.epsilon), scored.lengths)


@dataclass(frozen=True, slots=True)
class Constant(Advantage):
    """The same advantage for every token: 1 for imitation, 0 for distillation by the regularizer's gradient alone."""

    value: float = 1.0

    @property
    def is_zero(self) -> bool:
        return self.value == 0

    @property
    def formula(self) -> str:
        return f"{self.value:g}"

    def advantages(self, scored: Scored, columns: Mapping[str, Floats]) -> Floats:
        return np.where(scored.judged, self.value, 0.0)


class Whitening(StrEnum):
    """The normalisation of advantages over the batch."""

    NONE = "none"
    BATCH = "batch"
    """Mean 0 and standard deviation 1 over the judged tokens of the batch; see `whitened`."""


@dataclass(frozen=True, slots=True)
class RewardToGo(Advantage):
    """The discounted return Σ_{t' ≥ t} discount^{t'−t} r_{t'}, where r_t is a token's reward minus its KL cost.

    The rollout's last token has its whole reward R_i. With `credit` turns, a turn's last token has the turn's reward,
    and the rollout's last token the remainder R_i − Σ (rewards of turns). `kl` is β: each token costs
    β·(log π_old − log π_ref), the K1 penalty of Ziegler et al. 2019. With this cost and whitening, the estimator is
    REINFORCE++ (Hu 2025, Eq. 8). Truncated rollouts are treated like finished ones.
    """

    discount: float = 1.0
    kl: float = 0.0
    whitening: Whitening = Whitening.NONE
    epsilon: float = 1e-8
    credit: Credit = Credit.EPISODE

    @property
    def needs(self) -> frozenset[str]:
        return _KL_COLUMNS if self.kl else frozenset()

    @property
    def uneven(self) -> str:
        if self.kl or self.discount != 1.0:
            return _ONE_RETURN
        return _BY_EPISODE if self.credit is Credit.TURNS else ""

    def problems(self) -> Iterator[str]:
        yield from _beyond_one(discount=self.discount)

    @property
    def formula(self) -> str:
        power = "" if self.discount == 1.0 else f"{self.discount:g}^(t'−t)·"
        return _whitening(f"Σ_(t'≥t) {power}r_(t')", self.whitening) + _reward_formula(self.kl, self.credit)

    def advantages(self, scored: Scored, columns: Mapping[str, Floats]) -> Floats:
        judged, earned = scored.judged, token_rewards(scored, self.kl, columns, self.credit)
        returns = discounted(earned, scored.lengths, self.discount) * judged
        return whitened(returns, judged, self.epsilon) if self.whitening is Whitening.BATCH else returns


@dataclass(frozen=True, slots=True)
class GAE(Advantage):
    """Generalised advantage estimation (Schulman et al. 2016, Eq. 16): Σ_l (discount·trace)^l δ_{t+l}.

    δ_t = r_t + discount·V_{t+1} − V_t, with V = 0 after the last token and r as in `RewardToGo`. `values[t]` is the
    value of the state in which token t was sampled. Whitening follows implementations of PPO (Huang et al. 2022, detail
    7).
    """

    uneven: ClassVar = _ONE_RETURN

    discount: float = 1.0
    trace: float = 0.95
    kl: float = 0.0
    whitening: Whitening = Whitening.BATCH
    epsilon: float = 1e-8
    credit: Credit = Credit.EPISODE

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"values"}) | (_KL_COLUMNS if self.kl else frozenset())

    def problems(self) -> Iterator[str]:
        yield from _beyond_one(discount=self.discount, trace=self.trace)

    @property
    def formula(self) -> str:
        total = f"Σ_l {self.discount * self.trace:g}^l·δ_(t+l)"
        factor = "" if self.discount == 1.0 else f"{self.discount:g}·"
        surprise = f",  δ_t = r_t + {factor}V_(t+1) − V_t"
        return _whitening(total, self.whitening) + surprise + _reward_formula(self.kl, self.credit)

    def advantages(self, scored: Scored, columns: Mapping[str, Floats]) -> Floats:
        raw = self._raw(scored, columns)
        return whitened(raw, scored.judged, self.epsilon) if self.whitening is Whitening.BATCH else raw

    def returns(self, scored: Scored, columns: Mapping[str, Floats]) -> Floats:
        """Return the critic's targets [N], the TD(λ) returns: advantage before whitening + value; 0 if unjudged."""
        values = np.asarray(column_of(columns, "values"), np.float64)
        return self._raw(scored, columns) + values * scored.judged

    def _raw(self, scored: Scored, columns: Mapping[str, Floats]) -> Floats:
        values = np.asarray(column_of(columns, "values"), np.float64)
        following = np.append(values[1:], 0.0)[: values.size]
        following[ends_of(scored.lengths)] = 0.0
        surprise = token_rewards(scored, self.kl, columns, self.credit) + self.discount * following - values
        return discounted(surprise, scored.lengths, self.discount * self.trace) * scored.judged


@dataclass(frozen=True, slots=True)
class RoleBaseline(Advantage):
    """RAE of SPIRAL (Liu et al. 2025, arXiv 2506.24119): a role's reward minus a running mean of its earlier rewards.

    All tokens of role p in rollout i have A_{i,p} = R_{i,p} − b_p. Then b_p ← decay·b_p + (1 − decay)·R_{i,p}, rollout
    by rollout and across steps; b_p starts at 0. A role is one agent of one domain. R_{i,p} is the sum of the rewards
    of the role's turns; the role of the last turn also gets the remainder R_i − Σ (rewards of turns).
    """

    credit: ClassVar = Credit.TURNS
    state: ClassVar = True
    uneven: ClassVar = _ONE_ADVANTAGE

    decay: float = 0.95

    def problems(self) -> Iterator[str]:
        if self.decay >= 1.0:
            yield f"adv.decay must be below 1, got {self.decay}: the baseline would never change"

    @property
    def formula(self) -> str:
        return (
            f"R_{{i,p}} − b_p,  then b_p ← {self.decay:g}·b_p + {1 - self.decay:g}·R_{{i,p}},  p the role of the turn"
        )

    def advantages(self, scored: Scored, columns: Mapping[str, Floats]) -> Floats:
        return self._compared(scored)[0]

    def baselines(self, scored: Scored) -> dict[str, float]:
        return self._compared(scored)[1]

    def _compared(self, scored: Scored) -> tuple[Floats, dict[str, float]]:
        turns = scored.turns or Turns.of([(TurnReward(int(length)),) for length in scored.lengths])
        names, start = scored.roles or Roles([""] * len(turns.lengths), {})
        averages, advantages, first = dict(start), np.zeros(len(turns.lengths)), 0
        for rollout, count in enumerate(turns.counts.tolist()):
            own = range(first, first := first + count)
            if not (scored.valid[rollout] and count):
                continue
            earned = dict.fromkeys((names[turn] for turn in own), 0.0)
            for turn in own:
                earned[names[turn]] += float(turns.rewards[turn])
            earned[names[own[-1]]] += float(scored.rewards[rollout] - turns.rewards[own.start : own.stop].sum())
            advantages[own.start : own.stop] = [earned[names[turn]] - averages.get(names[turn], 0.0) for turn in own]
            averages |= {
                role: self.decay * averages.get(role, 0.0) + (1 - self.decay) * reward
                for role, reward in earned.items()
            }
        return np.repeat(advantages, turns.lengths), averages


@dataclass(frozen=True, slots=True)
class CovarianceClipped(Advantage):
    """Clip-Cov (Cui et al. 2025, arXiv 2505.22617): no gradient for a few of the tokens that would lower entropy most.

    The advantage is that of `GroupRelative`, but 0 for a `share` of the judged tokens (at least one). These are drawn
    at random from the tokens whose `covariances` lie between `low` and `high`. The draw depends only on the batch.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"old_logprobs"})
    uneven: ClassVar = _ONE_ADVANTAGE

    share: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    epsilon: float = 1e-6

    @property
    def formula(self) -> str:
        chosen = f"0 for {self.share:g}·N random tokens with {self.low:g} < cov_t < {self.high:g}"
        return f"A_i = (R_i − mean_g R) / (std_g R + {self.epsilon:g}){_DDOF}; {chosen},  {COVARIANCE}"

    def without_effect(self, key: str, size: int) -> Iterator[str]:
        if size == 1:
            yield f"adv covariance_clipped needs groups, and {key} is 1: every advantage would be 0; raise it"

    def advantages(self, scored: Scored, columns: Mapping[str, Floats]) -> Floats:
        advantages = GroupRelative(epsilon=self.epsilon).advantages(scored, columns)
        logprobs, judged = np.asarray(column_of(columns, "old_logprobs"), np.float64), scored.judged
        found = covariances(advantages, logprobs, judged)
        (candidates,) = np.nonzero(judged & (found > self.low) & (found < self.high))
        count = min(len(candidates), max(1, int(self.share * judged.sum())))
        draw = rng.generator(0, "clip-cov", zlib.crc32(logprobs.tobytes()))
        advantages[draw.choice(candidates, count, replace=False)] = 0.0
        return advantages


#: Formula of `covariances` as text.
COVARIANCE: Final = "cov_t = (A_t − mean A)·(log π_old − mean log π_old)"


def covariances(advantages: Floats, logprobs: Floats, judged: Bools) -> Floats:
    """Return (A_t − mean A)·(log π(o_t) − mean log π) [N] for judged tokens, and 0 for others (Cui et al. 2025)."""
    if not judged.any():
        return np.zeros_like(advantages)
    centred = (column - column[judged].mean() for column in (advantages, logprobs))
    return np.where(judged, math.prod(centred), 0.0)


_DDOF: Final = ",  std with ddof 0"

_TO_GO: Final = ",  G_{i,k} = R_i − Σ_(k'<k) r_{i,k'}"

_KL_COLUMNS: Final = frozenset({"old_logprobs", "ref_logprobs"})

KINDS: Final[Mapping[str, type[Advantage]]] = {
    "group_relative": GroupRelative,
    "group_filtered": GroupFiltered,
    "decoupled": Decoupled,
    "reward_to_go": RewardToGo,
    "gae": GAE,
    "constant": Constant,
    "role_baseline": RoleBaseline,
    "covariance_clipped": CovarianceClipped,
}


def ends_of(lengths: Ints) -> Ints:
    """Return the index, among all N sampled tokens, of each rollout's last token; empty rollouts are left out."""
    return np.asarray(np.cumsum(lengths)[lengths > 0] - 1)


def token_rewards(scored: Scored, kl: float, columns: Mapping[str, Floats], credit: Credit) -> Floats:
    """Return r [N]: the reward at each judged rollout's last token, minus kl·(log π_old − log π_ref) at every token.

    With credit by turns, a turn's reward is at the turn's last sampled token, or at the last sampled token before the
    turn if the turn has none. The rollout's reward minus the rewards of its turns is at the rollout's last token.
    """
    lengths, turns = scored.lengths, scored.turns
    earned, known = np.zeros(scored.num_tokens), scored.known
    if credit is Credit.TURNS and turns is not None:
        owners = np.repeat(np.arange(len(lengths)), turns.counts)
        given = turns.rewards * scored.valid[owners]
        known = known - np.bincount(owners, weights=given, minlength=len(lengths))
        ends, starts = np.cumsum(turns.lengths), np.cumsum(lengths) - lengths
        seen = ends > starts[owners]
        np.add.at(earned, ends[seen] - 1, given[seen])
    earned[ends_of(lengths)] += known[lengths > 0]
    if not kl:
        return earned
    return np.asarray(earned - kl * (column_of(columns, "old_logprobs") - column_of(columns, "ref_logprobs")))


def discounted(amounts: Floats, lengths: Ints, factor: float) -> Floats:
    """Return Σ_{t' ≥ t} factor^{t'−t}·amount_{t'} within each rollout, [N]."""
    totals = np.array(amounts, dtype=np.float64)
    ends, sizes = ends_of(lengths), lengths[lengths > 0]
    for behind in range(1, int(sizes.max(initial=0))):
        here = ends[sizes > behind] - behind
        totals[here] += factor * totals[here + 1]
    return totals


def whitened(amounts: Floats, judged: Bools, epsilon: float) -> Floats:
    """Return (a − mean) / (std + epsilon) over the judged tokens, [N]; 0 elsewhere. std has ddof 0."""
    if not judged.any():
        return np.zeros_like(amounts)
    mean, deviation = amounts[judged].mean(), amounts[judged].std()
    return np.where(judged, (amounts - mean) / (deviation + epsilon), 0.0)


def _whitening(text: str, whitening: Whitening) -> str:
    return f"whiten_batch({text}){_DDOF}" if whitening is Whitening.BATCH else text


def _reward_formula(kl: float, credit: Credit) -> str:
    earned = "r_{i,k} where t ends turn k" if credit is Credit.TURNS else "1[t = |o_i|]·R_i"
    return f",  r_t = {earned}" + (f" − {kl:g}·log(π_old/π_ref)" if kl else "")
