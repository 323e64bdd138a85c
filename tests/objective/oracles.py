"""Oracles: the surrogates of the papers, each written as loops over rollouts and tokens from its own formula.

Nothing is shared with the slots: torch differentiates what each paper prints. J is to be maximised. The columns of a
rollout cover only its sampled tokens. `theta` are the current log-probs, differentiable; `mu` the sampler's; `old` the
recomputed ones; `ref` the reference's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequence:
    """One rollout."""

    reward: float
    theta: Tensor
    mu: list[float]
    old: list[float]
    ref: list[float]
    values: list[float]
    everything: Tensor
    """Current log-probs of the whole vocabulary at each token, [N, V]; variables independent of theta."""

    def __len__(self) -> int:
        return len(self.mu)


Groups = list[list[Sequence]]


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def std(numbers: list[float]) -> float:
    return math.sqrt(mean([(x - mean(numbers)) ** 2 for x in numbers]))


def everyone(groups: Groups) -> list[Sequence]:
    return [one for group in groups for one in group]


def centred(group: list[Sequence], one: Sequence) -> float:
    return one.reward - mean([other.reward for other in group])


def normalised(group: list[Sequence], one: Sequence) -> float:
    return centred(group, one) / (std([other.reward for other in group]) + 1e-6)


def sequence_ratio(one: Sequence) -> Tensor:
    """Π_t π_θ/μ."""
    ratio = torch.ones((), dtype=torch.float64)
    for t in range(len(one)):
        ratio = ratio * torch.exp(one.theta[t] - one.mu[t])
    return ratio


def token_ratio(one: Sequence, t: int) -> Tensor:
    return torch.exp(one.theta[t] - one.mu[t])


def clipped(ratio: Tensor, advantage: float, low: float = 0.8, high: float = 1.2) -> Tensor:
    """PPO's min(r·A, clip(r)·A)."""
    return torch.minimum(ratio * advantage, torch.clamp(ratio, low, high) * advantage)


def per_rollout(groups: Groups, term: Callable[[list[Sequence], Sequence], Tensor]) -> Tensor:
    """Return the mean over groups of the mean over their rollouts."""
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        for one in group:
            total = total + term(group, one) / (len(groups) * len(group))
    return total


def per_token(
    groups: Groups, denominator: Callable[[list[Sequence], Sequence], float], term: Callable[..., Tensor]
) -> Tensor:
    """Return Σ of term(group, rollout, t) / denominator(group, rollout)."""
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        for one in group:
            for t in range(len(one)):
                total = total + term(group, one, t) / denominator(group, one)
    return total


def reinforce(groups: Groups) -> Tensor:
    """(1/G) Σ sg[r_i]·A_i·log π(o_i)."""
    return per_rollout(groups, lambda group, one: sequence_ratio(one).detach() * centred(group, one) * one.theta.sum())


def rloo(groups: Groups) -> Tensor:
    """(1/G) Σ sg[r_i]·(R_i − mean of the others)·log π(o_i)."""

    def term(group: list[Sequence], one: Sequence) -> Tensor:
        others = [other.reward for other in group if other is not one]
        return sequence_ratio(one).detach() * (one.reward - mean(others)) * one.theta.sum()

    return per_rollout(groups, term)


def reinforce_token(groups: Groups) -> Tensor:
    """1/(G·L_max) Σ Σ sg[r]·A·log π, L_max = 256."""
    size = len(everyone(groups)) * 256.0
    return per_token(
        groups,
        lambda group, one: size,
        lambda group, one, t: token_ratio(one, t).detach() * centred(group, one) * one.theta[t],
    )


def agarwal(groups: Groups) -> Tensor:
    """Token-level REINFORCE plus sg[r]·(λ/|A|) Σ_a log π(a|s) in every state, λ = 0.001."""
    size = len(everyone(groups)) * 256.0

    def barrier(group: list[Sequence], one: Sequence, t: int) -> Tensor:
        actions = one.everything[t]
        total = torch.zeros((), dtype=torch.float64)
        for action in range(len(actions)):
            total = total + actions[action]
        return token_ratio(one, t).detach() * 0.001 * total / len(actions)

    return reinforce_token(groups) + per_token(groups, lambda group, one: size, barrier)


def pipelinerl(groups: Groups) -> Tensor:
    """(1/B) Σ sg[r]·A·log π."""
    size = float(len(everyone(groups)))
    return per_token(
        groups,
        lambda group, one: size,
        lambda group, one, t: token_ratio(one, t).detach() * normalised(group, one) * one.theta[t],
    )


def cispo(groups: Groups) -> Tensor:
    """1/Σ_g|o| Σ Σ sg[min(r, 5)]·A·log π."""
    return per_token(
        groups,
        lambda group, one: len(groups) * sum(len(other) for other in group),
        lambda group, one, t: min(token_ratio(one, t).item(), 5.0) * normalised(group, one) * one.theta[t],
    )


def llamarl(groups: Groups) -> Tensor:
    """(1/B) Σ sg[min(π/μ, 4)]·A·log π."""
    size = float(len(everyone(groups)))
    return per_token(
        groups,
        lambda group, one: size,
        lambda group, one, t: min(token_ratio(one, t).item(), 4.0) * centred(group, one) * one.theta[t],
    )


def topr(groups: Groups) -> Tensor:
    """Σ_{good} A·log π(o) + Σ_{bad} [π/μ]_0^1·A·log π(o)."""

    def term(group: list[Sequence], one: Sequence) -> Tensor:
        advantage = centred(group, one)
        weight = 1.0 if advantage >= 0 else min(max(sequence_ratio(one).item(), 0.0), 1.0)
        return weight * advantage * one.theta.sum()

    return per_rollout(groups, term)


def ppo(groups: Groups) -> Tensor:
    """PPO's clipped surrogate with whitened GAE(γ = 1, λ = 0.95)."""
    raw: dict[int, list[float]] = {}
    for one in everyone(groups):
        advantage, mine, following = 0.0, [], 0.0
        for t in reversed(range(len(one))):
            earned = one.reward if t == len(one) - 1 else 0.0
            advantage = earned + following - one.values[t] + 0.95 * advantage
            following = one.values[t]
            mine.append(advantage)
        raw[id(one)] = mine[::-1]
    flat = [a for mine in raw.values() for a in mine]
    centre, scale = mean(flat), std(flat) + 1e-8
    return per_token(
        groups,
        lambda group, one: len(groups) * len(group) * len(one),
        lambda group, one, t: clipped(token_ratio(one, t), (raw[id(one)][t] - centre) / scale),
    )


def grpo(groups: Groups) -> Tensor:
    """1/G Σ 1/|o_i| Σ min(r·A, clip(r)·A)."""
    return per_token(
        groups,
        lambda group, one: len(groups) * len(group) * len(one),
        lambda group, one, t: clipped(token_ratio(one, t), normalised(group, one)),
    )


def grpo_kl(groups: Groups) -> Tensor:
    """GRPO minus 0.04·K3 to the reference, with π_ref/π_θ."""

    def k3(group: list[Sequence], one: Sequence, t: int) -> Tensor:
        ratio = torch.exp(one.ref[t] - one.theta[t])
        return ratio - torch.log(ratio) - 1

    return grpo(groups) - 0.04 * per_token(groups, lambda group, one: len(groups) * len(group) * len(one), k3)


def dapo(groups: Groups) -> Tensor:
    """1/Σ_g|o| Σ Σ min(r·A, clip(r, 0.8, 1.28)·A)."""
    return per_token(
        groups,
        lambda group, one: len(groups) * sum(len(other) for other in group),
        lambda group, one, t: clipped(token_ratio(one, t), normalised(group, one), high=1.28),
    )


def dr_grpo(groups: Groups) -> Tensor:
    """1/(G·256) Σ Σ min(r·A, clip(r)·A), A without the standard deviation."""
    size = len(everyone(groups)) * 256.0
    return per_token(
        groups, lambda group, one: size, lambda group, one, t: clipped(token_ratio(one, t), centred(group, one))
    )


def gspo(groups: Groups) -> Tensor:
    """1/G Σ min(s·A, clip(s, 1 − 3e-4, 1 + 4e-4)·A), s the geometric mean."""
    return per_rollout(
        groups,
        lambda group, one: clipped(
            sequence_ratio(one) ** (1 / len(one)), normalised(group, one), low=1 - 3e-4, high=1 + 4e-4
        ),
    )


def gmpo(groups: Groups) -> Tensor:
    """1/G Σ (Π_t |min(r·A, clip(r, e^−0.4, e^0.4)·A)|)^(1/|o|)·sgn A, with |A| taken out of the product."""

    def term(group: list[Sequence], one: Sequence) -> Tensor:
        advantage = normalised(group, one)
        product = torch.ones((), dtype=torch.float64)
        for t in range(len(one)):
            surrogate = clipped(token_ratio(one, t), advantage, low=math.exp(-0.4), high=math.exp(0.4))
            product = product * torch.abs(surrogate)
        return product ** (1 / len(one)) * math.copysign(1.0, advantage)

    return per_rollout(groups, term)


def gfpo(groups: Groups) -> Tensor:
    """GRPO's surrogate per token of the group, on only the shortest 8 rollouts of each group."""
    kept = {id(one) for group in groups for one in sorted(group, key=len)[:8]}

    def term(group: list[Sequence], one: Sequence, t: int) -> Tensor:
        chosen = [other for other in group if id(other) in kept]
        advantage = normalised(chosen, one) if id(one) in kept else 0.0
        return clipped(token_ratio(one, t), advantage)

    return per_token(groups, lambda group, one: len(groups) * sum(len(other) for other in group), term)


def reinforce_plus_plus(groups: Groups) -> Tensor:
    """Clipped surrogate with (A' − mean_batch)/std_batch over tokens, minus 0.001·K2."""
    flat = [centred(group, one) for group in groups for one in group for _ in range(len(one))]
    centre, scale = mean(flat), std(flat) + 1e-6

    def term(group: list[Sequence], one: Sequence, t: int) -> Tensor:
        k2 = 0.5 * (one.theta[t] - one.ref[t]) ** 2
        return clipped(token_ratio(one, t), (centred(group, one) - centre) / scale) - 0.001 * k2

    return per_token(groups, lambda group, one: len(groups) * len(group) * len(one), term)


def decoupled_ppo(groups: Groups) -> Tensor:
    """Mean over tokens of (π_old/μ)·min(u·A, clip(u)·A), u = π_θ/π_old; tokens with π_old/μ > 5 are excluded."""
    size = sum(len(one) for one in everyone(groups))
    flat = [one.reward for one in everyone(groups) for _ in range(len(one))]
    centre, scale = mean(flat), std(flat) + 1e-8

    def term(group: list[Sequence], one: Sequence, t: int) -> Tensor:
        weight = math.exp(one.old[t] - one.mu[t])
        surrogate = clipped(torch.exp(one.theta[t] - one.old[t]), (one.reward - centre) / scale)
        return (weight if weight <= 5.0 else 0.0) * surrogate

    return per_token(groups, lambda group, one: size, term)


def _of_the_note(weight: Callable[[float], float]) -> Callable[[Groups], Tensor]:
    def surrogate(groups: Groups) -> Tensor:
        return per_token(
            groups,
            lambda group, one: len(groups) * len(group) * len(one),
            lambda group, one, t: (
                weight(math.exp(one.old[t] - one.mu[t]))
                * clipped(torch.exp(one.theta[t] - one.old[t]), normalised(group, one))
            ),
        )

    return surrogate


ORACLES: dict[str, Callable[[Groups], Tensor]] = {
    "reinforce": reinforce,
    "reinforce_token": reinforce_token,
    "rloo": rloo,
    "pipelinerl": pipelinerl,
    "cispo": cispo,
    "llamarl": llamarl,
    "topr": topr,
    "agarwal": agarwal,
    "ppo": ppo,
    "grpo": grpo,
    "grpo_kl": grpo_kl,
    "dapo": dapo,
    "dr_grpo": dr_grpo,
    "gspo": gspo,
    "gmpo": gmpo,
    "gfpo": gfpo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "decoupled_ppo": decoupled_ppo,
    "ppo_recomputed": _of_the_note(lambda ratio: 1.0),
    "ppo_tis": _of_the_note(lambda ratio: min(ratio, 2.0)),
    "ppo_vanilla_is": _of_the_note(lambda ratio: ratio),
    "ppo_is": grpo,
}
