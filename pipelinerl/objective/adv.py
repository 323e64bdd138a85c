"""Slot `adv` of RLAX Eq. 3: advantages of sampled tokens, computed once on the whole batch.

Advantages that depend only on rewards are computed before the batch is packed, the others after the forward passes that
they need. Rollouts without a judgement take part in no baseline and no normalisation; their tokens have advantage 0.

Letters in shapes: B rollouts of the batch, N = Σ lengths sampled tokens, rollout after rollout, M turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple, Protocol, Self, final

import numpy as np
from numpy.typing import NDArray

from pipelinerl.objective.tokens import column_of

Ints = NDArray[np.integer]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


class TurnReward(NamedTuple):
    """One turn for the assignment of credit: sampled tokens, the environment's reward, and the agent."""

    num_tokens: int
    reward: float = 0.0
    agent: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The turns of B rollouts, [M]: rollout after rollout, and within each in the order in which they ended.

    Attributes:
        counts: [B], turns of each rollout.
        lengths: [M], tokens that the model sampled in each turn.
        rewards: [M], the environment's reward of each turn.
        places: [M]. Turns of one group with equal places are compared: the k-th turns of an agent.
    """

    counts: Ints
    lengths: Ints
    rewards: Floats
    places: Ints

    @classmethod
    def of(cls, rollouts: Sequence[Sequence[TurnReward]]) -> Self:
        """Return the turns of these rollouts."""
        places: dict[tuple[str, int], int] = {}
        placed: list[int] = []
        for turns in rollouts:
            seen: Counter[str] = Counter()
            for turn in turns:
                placed.append(places.setdefault((turn.agent, seen[turn.agent]), len(places)))
                seen[turn.agent] += 1
        flat = [turn for turns in rollouts for turn in turns]
        return cls(
            counts=np.array([len(turns) for turns in rollouts], np.int64),
            lengths=np.array([turn.num_tokens for turn in flat], np.int64),
            rewards=np.array([turn.reward for turn in flat], np.float64),
            places=np.array(placed, np.int64),
        )

    def rewards_to_go(self, rewards: Floats) -> Floats:
        """Return G_{i,k} = R_i − Σ_{k' < k} r_{i,k'}, [M]: the rollout's reward from turn k on.

        The last turn receives the part of the verdict's reward R_i that was given to no turn.

        Args:
            rewards: R, [B].
        """
        before = np.cumsum(self.rewards) - self.rewards
        starts = np.cumsum(self.counts) - self.counts
        has_turns = self.counts > 0
        offsets = np.zeros(self.counts.shape)
        offsets[has_turns] = before[starts[has_turns]]
        return np.asarray(np.repeat(rewards + offsets, self.counts) - before)


class Advantage(Protocol):
    """An estimator of the advantages of sampled tokens."""

    @property
    def needs(self) -> frozenset[str]:
        """Optional columns it reads, such as `values`; the forward passes for them come first."""
        ...

    @property
    def formula(self) -> str:
        """A_{i,t} as text."""
        ...

    def advantages(
        self,
        *,
        rewards: Floats,
        groups: Ints,
        lengths: Ints,
        valid: Bools,
        columns: Mapping[str, Floats],
        turns: Turns | None = None,
    ) -> Floats:
        """Return the advantage [N] of each sampled token.

        Args:
            rewards: [B]; any value where not `valid`.
            groups: [B], index of the rollout's group; any integers.
            lengths: [B], tokens that the model sampled.
            valid: [B], False if the verdict is not a judgement.
            columns: each of `needs`, [N].
            turns: of the rollouts; None if each is a single turn.
        """
        ...


class Baseline(StrEnum):
    """The quantity that is subtracted from a reward."""

    NONE = "none"
    MEAN = "mean"
    """Mean of the group, the rollout itself included: (G − 1)/G of `leave_one_out`, which is how RLAX writes it."""
    LEAVE_ONE_OUT = "leave_one_out"
    """Mean of the others of the group (Kool et al. 2019); unbiased. A rollout without others has advantage 0."""


class Scale(StrEnum):
    """The quantity by which the difference is divided."""

    NONE = "none"
    STD = "std"
    """Standard deviation of the group + `epsilon`. GRPO. That of the population: the divisor is G (ddof 0), where
    torch's own `std` divides by G − 1 and gives √((G − 1)/G) of these advantages."""
    BATCH = "batch"
    """The difference is normalised over the batch's tokens: `whitened`. REINFORCE++, Eq. 12."""


class Credit(StrEnum):
    """The rewards of an episode with which a turn is credited."""

    EPISODE = "episode"
    """All of them: each token has the advantage of its rollout."""
    TURNS = "turns"
    """Those from the turn on, compared with the same turn of the group's other rollouts."""


@final
@dataclass(frozen=True, slots=True)
class GroupRelative:
    """(R_i − baseline) / scale, each over the group of the rollout. GRPO: mean and std; Dr. GRPO: mean alone.

    With `credit` turns, the reward-to-go of a turn (`Turns.rewards_to_go`) replaces R_i, and the same turn of the
    group's rollouts replaces the group: A_{i,k} = (G_{i,k} − baseline_{g,k}) / scale_{g,k}. A turn that no other
    rollout of the group has reached has advantage 0 if the baseline is a mean.
    """

    baseline: Baseline = Baseline.MEAN
    scale: Scale = Scale.STD
    epsilon: float = 1e-6
    credit: Credit = Credit.EPISODE

    @property
    def needs(self) -> frozenset[str]:
        """Empty: it reads no optional column."""
        return frozenset()

    @property
    def formula(self) -> str:
        """A_{i,t} as text."""
        if self.credit is Credit.TURNS:
            earned, others, group, end = "G_{i,k}", "G", ",k", ",  G_{i,k} = R_i − Σ_(k'<k) r_{i,k'}"
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
        return difference + end

    def advantages(
        self,
        *,
        rewards: Floats,
        groups: Ints,
        lengths: Ints,
        valid: Bools,
        columns: Mapping[str, Floats],
        turns: Turns | None = None,
    ) -> Floats:
        """Return the advantage [N] of each sampled token."""
        if self.credit is Credit.TURNS and turns is not None:
            return self._of_turns(turns, rewards=rewards, groups=groups, valid=valid)
        _, index = np.unique(groups, return_inverse=True)
        known = np.where(valid, rewards, 0.0).astype(np.float64)
        count = np.bincount(index, weights=valid.astype(np.float64), minlength=1)
        mean = np.bincount(index, weights=known, minlength=1) / np.maximum(count, 1.0)
        difference = np.where(valid, known - mean[index], 0.0)
        deviation = np.sqrt(np.bincount(index, weights=difference**2, minlength=1) / np.maximum(count, 1.0))
        if self.baseline is Baseline.NONE:
            difference = known
        elif self.baseline is Baseline.LEAVE_ONE_OUT:
            # R_i − (ΣR − R_i)/(n − 1) = n/(n − 1)·(R_i − mean); for n = 1 the difference is 0 already.
            difference = difference * (count / np.maximum(count - 1.0, 1.0))[index]
        if self.scale is Scale.STD:
            difference = difference / (deviation[index] + self.epsilon)
        spread = np.repeat(difference, lengths)
        return whitened(spread, np.repeat(valid, lengths), self.epsilon) if self.scale is Scale.BATCH else spread

    def _of_turns(self, turns: Turns, *, rewards: Floats, groups: Ints, valid: Bools) -> Floats:
        """Return the advantages of the same estimator with turns in place of rollouts."""
        known = np.where(valid, rewards, 0.0).astype(np.float64)
        pairs = np.stack([np.repeat(groups, turns.counts), turns.places])
        _, same_turn = np.unique(pairs, axis=1, return_inverse=True)
        return replace(self, credit=Credit.EPISODE).advantages(
            rewards=turns.rewards_to_go(known),
            groups=same_turn.reshape(-1),
            lengths=turns.lengths,
            valid=np.repeat(valid, turns.counts),
            columns={},
        )


class Metric(StrEnum):
    """The measure by which rollouts of a group are preferred."""

    SHORTEST = "shortest"
    """The fewest sampled tokens first."""
    TOKEN_EFFICIENCY = "token_efficiency"
    """The highest reward per sampled token first."""


@final
@dataclass(frozen=True, slots=True)
class GroupFiltered:
    """GFPO (Shrivastava et al. 2025 §3): of each group the best `keep` learn, from one another; the rest is 0.

    (R_i − mean_S R) / (std_S R + epsilon) for i in S, the `keep` judged rollouts of the group that `metric` prefers;
    of equals the earlier one. A group with fewer judged rollouts keeps them all.
    """

    keep: int = 8
    metric: Metric = Metric.SHORTEST
    epsilon: float = 1e-6

    @property
    def needs(self) -> frozenset[str]:
        """Empty: it reads no optional column."""
        return frozenset()

    @property
    def formula(self) -> str:
        """A_{i,t} as text."""
        return f"1[i ∈ S]·(R_i − mean_S R) / (std_S R + {self.epsilon:g}),  S = the {self.keep} by {self.metric}{_DDOF}"

    def advantages(
        self,
        *,
        rewards: Floats,
        groups: Ints,
        lengths: Ints,
        valid: Bools,
        columns: Mapping[str, Floats],
        turns: Turns | None = None,
    ) -> Floats:
        """Return the advantage [N] of each sampled token."""
        known = np.where(valid, rewards, 0.0)
        preference = -lengths if self.metric is Metric.SHORTEST else known / np.maximum(lengths, 1)
        kept = np.zeros(valid.shape, dtype=bool)
        for group in np.unique(groups):
            members = np.flatnonzero((groups == group) & valid)
            kept[members[np.argsort(-preference[members], kind="stable")[: self.keep]]] = True
        return GroupRelative(epsilon=self.epsilon).advantages(
            rewards=rewards, groups=groups, lengths=lengths, valid=kept, columns=columns
        )


class Whitening(StrEnum):
    """The normalisation of advantages over the batch."""

    NONE = "none"
    BATCH = "batch"
    """To mean 0 and standard deviation 1 over the judged tokens of the batch: `whitened`."""


@final
@dataclass(frozen=True, slots=True)
class RewardToGo:
    """The return itself: Σ_{t' ≥ t} discount^{t'−t} r_{t'}, where r is R_i at the last token less the KL cost.

    With `kl` β > 0 each token costs β·(log π_old − log π_ref): the K1 penalty of Ziegler et al. 2019, and REINFORCE++
    (Hu 2025, Eq. 8) when whitened. A rollout that was cut off counts as one that ended.
    """

    discount: float = 1.0
    kl: float = 0.0
    whitening: Whitening = Whitening.NONE
    epsilon: float = 1e-8

    @property
    def needs(self) -> frozenset[str]:
        """`old_logprobs` and `ref_logprobs`, unless `kl` is 0."""
        return _KL_COLUMNS if self.kl else frozenset()

    @property
    def formula(self) -> str:
        """A_{i,t} as text."""
        power = "" if self.discount == 1.0 else f"{self.discount:g}^(t'−t)·"
        return _whitening(f"Σ_(t'≥t) {power}r_(t')", self.whitening) + _reward_formula(self.kl)

    def advantages(
        self,
        *,
        rewards: Floats,
        groups: Ints,
        lengths: Ints,
        valid: Bools,
        columns: Mapping[str, Floats],
        turns: Turns | None = None,
    ) -> Floats:
        """Return the advantage [N] of each sampled token."""
        judged = np.repeat(valid, lengths)
        returns = discounted(token_rewards(rewards, lengths, valid, self.kl, columns), lengths, self.discount) * judged
        return whitened(returns, judged, self.epsilon) if self.whitening is Whitening.BATCH else returns


@final
@dataclass(frozen=True, slots=True)
class GAE:
    """Generalised advantage estimation (Schulman et al. 2016, Eq. 16): Σ_l (discount·trace)^l δ_{t+l}.

    δ_t = r_t + discount·V_{t+1} − V_t, V = 0 after the last token, r as in `RewardToGo`. `values[t]` is of the state in
    which token t was chosen. Whitened, as PPO's implementations do (Huang et al. 2022, detail 7).
    """

    discount: float = 1.0
    trace: float = 0.95
    kl: float = 0.0
    whitening: Whitening = Whitening.BATCH
    epsilon: float = 1e-8

    @property
    def needs(self) -> frozenset[str]:
        """`values`; and `old_logprobs` and `ref_logprobs`, unless `kl` is 0."""
        return frozenset({"values"}) | (_KL_COLUMNS if self.kl else frozenset())

    @property
    def formula(self) -> str:
        """A_{i,t} as text."""
        total = f"Σ_l {self.discount * self.trace:g}^l·δ_(t+l)"
        factor = "" if self.discount == 1.0 else f"{self.discount:g}·"
        surprise = f",  δ_t = r_t + {factor}V_(t+1) − V_t"
        return _whitening(total, self.whitening) + surprise + _reward_formula(self.kl)

    def advantages(
        self,
        *,
        rewards: Floats,
        groups: Ints,
        lengths: Ints,
        valid: Bools,
        columns: Mapping[str, Floats],
        turns: Turns | None = None,
    ) -> Floats:
        """Return the advantage [N] of each sampled token."""
        judged = np.repeat(valid, lengths)
        raw = self._raw(rewards, lengths, valid, columns)
        return whitened(raw, judged, self.epsilon) if self.whitening is Whitening.BATCH else raw

    def returns(
        self,
        *,
        rewards: Floats,
        groups: Ints,
        lengths: Ints,
        valid: Bools,
        columns: Mapping[str, Floats],
        turns: Turns | None = None,
    ) -> Floats:
        """Return the critic's targets [N]: the advantage before whitening + the value; 0 without a judgement.

        The TD(λ) return. `groups` and `turns` are not read; both methods are called alike.
        """
        values = np.asarray(column_of(columns, "values"), np.float64)
        return self._raw(rewards, lengths, valid, columns) + values * np.repeat(valid, lengths)

    def _raw(self, rewards: Floats, lengths: Ints, valid: Bools, columns: Mapping[str, Floats]) -> Floats:
        values = np.asarray(column_of(columns, "values"), np.float64)
        following = np.append(values[1:], 0.0)[: values.size]
        following[ends_of(lengths)] = 0.0
        surprise = token_rewards(rewards, lengths, valid, self.kl, columns) + self.discount * following - values
        return discounted(surprise, lengths, self.discount * self.trace) * np.repeat(valid, lengths)


def credits_turns(adv: Advantage) -> bool:
    """Return whether an estimator reads the rewards of turns."""
    return isinstance(adv, GroupRelative) and adv.credit is Credit.TURNS


#: States the kind of standard deviation.
_DDOF: Final = ",  std with ddof 0"

_KL_COLUMNS: Final = frozenset({"old_logprobs", "ref_logprobs"})

KINDS: Final[Mapping[str, type[Advantage]]] = {
    "group_relative": GroupRelative,
    "group_filtered": GroupFiltered,
    "reward_to_go": RewardToGo,
    "gae": GAE,
}


def ends_of(lengths: Ints) -> Ints:
    """Return the positions within [N] of the last sampled token of each rollout that has any."""
    return np.asarray(np.cumsum(lengths)[lengths > 0] - 1)


def token_rewards(rewards: Floats, lengths: Ints, valid: Bools, kl: float, columns: Mapping[str, Floats]) -> Floats:
    """Return r [N]: the reward at the last token of each judged rollout, less kl·(log π_old − log π_ref) at every
    token.
    """
    earned = np.zeros(int(lengths.sum()))
    earned[ends_of(lengths)] = np.where(valid, rewards, 0.0)[lengths > 0]
    if not kl:
        return earned
    return np.asarray(earned - kl * (column_of(columns, "old_logprobs") - column_of(columns, "ref_logprobs")))


def discounted(amounts: Floats, lengths: Ints, factor: float) -> Floats:
    """Σ_{t' ≥ t} factor^{t'−t}·amount_{t'} within each rollout, [N]: all rollouts at once, the last tokens first."""
    totals = np.array(amounts, dtype=np.float64)
    ends, sizes = ends_of(lengths), lengths[lengths > 0]
    for behind in range(1, int(sizes.max(initial=0))):
        here = ends[sizes > behind] - behind
        totals[here] += factor * totals[here + 1]
    return totals


def whitened(amounts: Floats, judged: Bools, epsilon: float) -> Floats:
    """(a − mean) / (std + epsilon) over the tokens that are judged, [N]; 0 elsewhere. std has ddof 0."""
    if not judged.any():
        return np.zeros_like(amounts)
    mean, deviation = amounts[judged].mean(), amounts[judged].std()
    return np.where(judged, (amounts - mean) / (deviation + epsilon), 0.0)


def _whitening(text: str, whitening: Whitening) -> str:
    return f"whiten_batch({text}){_DDOF}" if whitening is Whitening.BATCH else text


def _reward_formula(kl: float) -> str:
    return ",  r_t = 1[t = |o_i|]·R_i" + (f" − {kl:g}·log(π_old/π_ref)" if kl else "")
