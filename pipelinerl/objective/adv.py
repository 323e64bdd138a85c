"""Slot `adv` of RLAX Eq. 3: advantages of sampled tokens, computed once on the whole batch.

Advantages that depend only on rewards are computed before the batch is packed; the others after the forward passes that
they need. Rollouts without a judgement are excluded from baselines and normalisation; their tokens have advantage 0.

Letters in shapes: B rollouts of the batch, N = Σ lengths sampled tokens (concatenated by rollout), M turns.
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
    """One turn for credit assignment: the number of sampled tokens, the environment's reward, and the agent."""

    num_tokens: int
    reward: float = 0.0
    agent: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The turns of B rollouts, [M], concatenated by rollout and ordered by end time within each rollout.

    Attributes:
        counts: [B], turns of each rollout.
        lengths: [M], tokens that the model sampled in each turn.
        rewards: [M], the environment's reward of each turn.
        places: [M]. Two turns of a group have equal places if each is the k-th turn of the same agent; such turns are
            compared with each other.
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

        The last turn receives the part of the verdict's reward R_i that was not assigned to any turn.

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
        """Optional columns that the estimator reads, such as `values`; their forward passes run first."""
        ...

    @property
    def formula(self) -> str:
        """Formula of A_{i,t} as text."""
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
    """Mean of the group including the rollout, as in RLAX; the difference is (G − 1)/G of that of `leave_one_out`."""
    LEAVE_ONE_OUT = "leave_one_out"
    """Mean of the group's other rollouts (Kool et al. 2019); unbiased. A single rollout has advantage 0."""


class Scale(StrEnum):
    """The quantity by which the difference is divided."""

    NONE = "none"
    STD = "std"
    """Standard deviation of the group + `epsilon`, as in GRPO. The divisor is G (ddof 0); torch's default `std` divides
    by G − 1, which gives √((G − 1)/G) times these advantages."""
    BATCH = "batch"
    """Normalise the difference over the batch's tokens; see `whitened`. REINFORCE++, Eq. 12."""


class Credit(StrEnum):
    """The rewards of an episode with which a turn is credited."""

    EPISODE = "episode"
    """All rewards: each token has the advantage of its rollout."""
    TURNS = "turns"
    """Rewards from the turn on, compared with the same turn of the group's other rollouts."""


@final
@dataclass(frozen=True, slots=True)
class GroupRelative:
    """(R_i − baseline) / scale, each over the rollout's group. GRPO uses mean and std; Dr. GRPO uses the mean alone.

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
        """The empty set: no optional column is read."""
        return frozenset()

    @property
    def formula(self) -> str:
        """Formula of A_{i,t} as text."""
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
            # R_i − (ΣR − R_i)/(n − 1) = n/(n − 1)·(R_i − mean); for n = 1 the difference is already 0.
            difference = difference * (count / np.maximum(count - 1.0, 1.0))[index]
        if self.scale is Scale.STD:
            difference = difference / (deviation[index] + self.epsilon)
        spread = np.repeat(difference, lengths)
        return whitened(spread, np.repeat(valid, lengths), self.epsilon) if self.scale is Scale.BATCH else spread

    def _of_turns(self, turns: Turns, *, rewards: Floats, groups: Ints, valid: Bools) -> Floats:
        """Return the advantages [N] with credit by turns: a turn is compared with the same turn of the group's other
        rollouts.
        """
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
    """The measure that ranks the rollouts of a group."""

    SHORTEST = "shortest"
    """Fewest sampled tokens first."""
    TOKEN_EFFICIENCY = "token_efficiency"
    """Highest reward per sampled token first."""


@final
@dataclass(frozen=True, slots=True)
class GroupFiltered:
    """GFPO (Shrivastava et al. 2025 §3): only the best `keep` rollouts of each group train; all others get 0.

    The advantage is (R_i − mean_S R) / (std_S R + epsilon) for i in S. S is the set of the `keep` judged rollouts of
    the group that `metric` ranks first; ties go to the earlier rollout. A group with fewer judged rollouts keeps all of
    them.
    """

    keep: int = 8
    metric: Metric = Metric.SHORTEST
    epsilon: float = 1e-6

    @property
    def needs(self) -> frozenset[str]:
        """The empty set: no optional column is read."""
        return frozenset()

    @property
    def formula(self) -> str:
        """Formula of A_{i,t} as text."""
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
    """Mean 0 and standard deviation 1 over the judged tokens of the batch; see `whitened`."""


@final
@dataclass(frozen=True, slots=True)
class RewardToGo:
    """The plain return: Σ_{t' ≥ t} discount^{t'−t} r_{t'}, where r is R_i at the last token minus the KL cost.

    With `kl` β > 0 each token costs β·(log π_old − log π_ref). This is the K1 penalty of Ziegler et al. 2019, and with
    whitening it is REINFORCE++ (Hu 2025, Eq. 8). A truncated rollout is treated like a finished one.
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
        """Formula of A_{i,t} as text."""
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

    δ_t = r_t + discount·V_{t+1} − V_t, with V = 0 after the last token and r as in `RewardToGo`. `values[t]` belongs to
    the state in which token t was chosen. Whitening follows PPO's implementations (Huang et al. 2022, detail 7).
    """

    discount: float = 1.0
    trace: float = 0.95
    kl: float = 0.0
    whitening: Whitening = Whitening.BATCH
    epsilon: float = 1e-8

    @property
    def needs(self) -> frozenset[str]:
        """`values`; also `old_logprobs` and `ref_logprobs`, unless `kl` is 0."""
        return frozenset({"values"}) | (_KL_COLUMNS if self.kl else frozenset())

    @property
    def formula(self) -> str:
        """Formula of A_{i,t} as text."""
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
        """Return the critic's targets [N]: the advantage before whitening plus the value; 0 without a judgement.

        This is the TD(λ) return. `groups` and `turns` are unused; they keep the signature equal to that of
        `advantages`.
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
    """Return True if the estimator reads the rewards of turns."""
    return isinstance(adv, GroupRelative) and adv.credit is Credit.TURNS


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
    """Return r [N]: the reward at each judged rollout's last token, minus kl·(log π_old − log π_ref) at every token."""
    earned = np.zeros(int(lengths.sum()))
    earned[ends_of(lengths)] = np.where(valid, rewards, 0.0)[lengths > 0]
    if not kl:
        return earned
    return np.asarray(earned - kl * (column_of(columns, "old_logprobs") - column_of(columns, "ref_logprobs")))


def discounted(amounts: Floats, lengths: Ints, factor: float) -> Floats:
    """Return Σ_{t' ≥ t} factor^{t'−t}·amount_{t'} within each rollout, [N].

    The loop runs backwards over token positions and handles all rollouts at each position at once.
    """
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


def _reward_formula(kl: float) -> str:
    return ",  r_t = 1[t = |o_i|]·R_i" + (f" − {kl:g}·log(π_old/π_ref)" if kl else "")
