"""Oracles: the surrogate objectives J of the papers, each written from its printed formula as loops over tokens.

No code is shared with the objective under test: torch differentiates each formula as printed. J is maximised. The lists
of a rollout cover only its sampled tokens. `theta` are the current log-probs, differentiable; `mu` the sampler's; `old`
the recomputed ones; `ref` the reference's. In the formulas, r = π_θ/μ is the ratio of a token, and r_i that of a whole
rollout o_i; R is the reward, A the advantage, |o_i| the rollout's length, G the number of rollouts in a group, B and N
the numbers of rollouts and tokens in the batch; sg stops the gradient, σ is the sigmoid, and K2 and K3 estimate the KL.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequence:
    """One rollout: its reward, and one entry for each sampled token in each list and tensor."""

    reward: float
    theta: Tensor
    mu: list[float]
    old: list[float]
    ref: list[float]
    values: list[float]
    parts: list[tuple[float, float]]
    """Terms of the reward, each a pair (reward, weight)."""
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
    """Return the ratio of a whole rollout, Π_t π_θ/μ."""
    ratio = torch.ones((), dtype=torch.float64)
    for t in range(len(one)):
        ratio = ratio * torch.exp(one.theta[t] - one.mu[t])
    return ratio


def token_ratio(one: Sequence, t: int) -> Tensor:
    return torch.exp(one.theta[t] - one.mu[t])


def clipped(ratio: Tensor, advantage: float, low: float = 0.8, high: float = 1.2) -> Tensor:
    """Return PPO's clipped term, min(r·A, clip(r, low, high)·A)."""
    return torch.minimum(ratio * advantage, torch.clamp(ratio, low, high) * advantage)


def per_rollout(groups: Groups, term: Callable[[list[Sequence], Sequence], Tensor]) -> Tensor:
    """Return the mean over groups of the mean of `term` over the group's rollouts."""
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        for one in group:
            total = total + term(group, one) / (len(groups) * len(group))
    return total


def per_token(
    groups: Groups, denominator: Callable[[list[Sequence], Sequence], float], term: Callable[..., Tensor]
) -> Tensor:
    """Return the sum over all tokens t of term(group, rollout, t) / denominator(group, rollout)."""
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        for one in group:
            for t in range(len(one)):
                total = total + term(group, one, t) / denominator(group, one)
    return total


def reinforce(groups: Groups) -> Tensor:
    """J = (1/G) Σ sg[r_i]·A_i·log π(o_i)."""
    return per_rollout(groups, lambda group, one: sequence_ratio(one).detach() * centred(group, one) * one.theta.sum())


def rloo(groups: Groups) -> Tensor:
    """J = (1/G) Σ sg[r_i]·(R_i − mean of the group's other rewards)·log π(o_i)."""

    def term(group: list[Sequence], one: Sequence) -> Tensor:
        others = [other.reward for other in group if other is not one]
        return sequence_ratio(one).detach() * (one.reward - mean(others)) * one.theta.sum()

    return per_rollout(groups, term)


def reinforce_token(groups: Groups) -> Tensor:
    """J = 1/(G·L_max) Σ Σ sg[r]·A·log π, L_max = 256."""
    size = len(everyone(groups)) * 256.0
    return per_token(
        groups,
        lambda group, one: size,
        lambda group, one, t: token_ratio(one, t).detach() * centred(group, one) * one.theta[t],
    )


def agarwal(groups: Groups) -> Tensor:
    """J of `reinforce_token`, plus sg[r]·(λ/V) Σ_a log π(a|s) in every state, over V tokens a, λ = 0.001."""
    size = len(everyone(groups)) * 256.0

    def barrier(group: list[Sequence], one: Sequence, t: int) -> Tensor:
        actions = one.everything[t]
        total = torch.zeros((), dtype=torch.float64)
        for action in range(len(actions)):
            total = total + actions[action]
        return token_ratio(one, t).detach() * 0.001 * total / len(actions)

    return reinforce_token(groups) + per_token(groups, lambda group, one: size, barrier)


def pipelinerl(groups: Groups) -> Tensor:
    """J = (1/B) Σ sg[r]·A·log π."""
    size = float(len(everyone(groups)))
    return per_token(
        groups,
        lambda group, one: size,
        lambda group, one, t: token_ratio(one, t).detach() * normalised(group, one) * one.theta[t],
    )


def cispo(groups: Groups) -> Tensor:
    """J = 1/Σ_g|o| Σ Σ sg[min(r, 5)]·A·log π."""
    return per_token(
        groups,
        lambda group, one: len(groups) * sum(len(other) for other in group),
        lambda group, one, t: min(token_ratio(one, t).item(), 5.0) * normalised(group, one) * one.theta[t],
    )


def llamarl(groups: Groups) -> Tensor:
    """J = (1/B) Σ sg[min(π/μ, 4)]·A·log π."""
    size = float(len(everyone(groups)))
    return per_token(
        groups,
        lambda group, one: size,
        lambda group, one, t: min(token_ratio(one, t).item(), 4.0) * centred(group, one) * one.theta[t],
    )


def topr(groups: Groups) -> Tensor:
    """J = Σ_{A ≥ 0} A·log π(o_i) + Σ_{A < 0} c·A·log π(o_i), where c is r_i clipped to [0, 1]."""

    def term(group: list[Sequence], one: Sequence) -> Tensor:
        advantage = centred(group, one)
        weight = 1.0 if advantage >= 0 else min(max(sequence_ratio(one).item(), 0.0), 1.0)
        return weight * advantage * one.theta.sum()

    return per_rollout(groups, term)


def whitened_gae(groups: Groups) -> dict[int, list[float]]:
    """Return GAE(γ = 1, λ = 0.95) of each rollout's tokens, whitened over all tokens, by the rollout's id."""
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
    return {name: [(a - centre) / scale for a in mine] for name, mine in raw.items()}


def ppo(groups: Groups) -> Tensor:
    """J = 1/G Σ 1/|o_i| Σ min(r·A, clip(r)·A), with advantages from `whitened_gae`."""
    found = whitened_gae(groups)
    return per_token(
        groups,
        lambda group, one: len(groups) * len(group) * len(one),
        lambda group, one, t: clipped(token_ratio(one, t), found[id(one)][t]),
    )


def ppo_dual_clip(groups: Groups) -> Tensor:
    """J = (1/N) Σ max(min(r·A, clip(r, 1 ± 0.2)·A), 3·A) where A < 0, and PPO's min elsewhere."""
    size = float(sum(map(len, everyone(groups))))

    def term(group: list[Sequence], one: Sequence, t: int) -> Tensor:
        advantage = normalised(group, one)
        surrogate = clipped(token_ratio(one, t), advantage)
        return torch.maximum(surrogate, torch.tensor(3.0 * advantage)) if advantage < 0 else surrogate

    return per_token(groups, lambda group, one: size, term)


def grpo(groups: Groups) -> Tensor:
    """J = 1/G Σ 1/|o_i| Σ min(r·A, clip(r)·A)."""
    return per_token(
        groups,
        lambda group, one: len(groups) * len(group) * len(one),
        lambda group, one, t: clipped(token_ratio(one, t), normalised(group, one)),
    )


def grpo_kl(groups: Groups) -> Tensor:
    """J of `grpo`, minus 0.04·K3 of the KL to the reference, with the ratio π_ref/π_θ."""

    def k3(group: list[Sequence], one: Sequence, t: int) -> Tensor:
        ratio = torch.exp(one.ref[t] - one.theta[t])
        return ratio - torch.log(ratio) - 1

    return grpo(groups) - 0.04 * per_token(groups, lambda group, one: len(groups) * len(group) * len(one), k3)


def dapo(groups: Groups) -> Tensor:
    """J = 1/Σ_g|o| Σ Σ min(r·A, clip(r, 0.8, 1.28)·A)."""
    return per_token(
        groups,
        lambda group, one: len(groups) * sum(len(other) for other in group),
        lambda group, one, t: clipped(token_ratio(one, t), normalised(group, one), high=1.28),
    )


def dr_grpo(groups: Groups) -> Tensor:
    """J = 1/(G·256) Σ Σ min(r·A, clip(r)·A), A = R − mean."""
    size = len(everyone(groups)) * 256.0
    return per_token(
        groups, lambda group, one: size, lambda group, one, t: clipped(token_ratio(one, t), centred(group, one))
    )


def gspo(groups: Groups) -> Tensor:
    """J = 1/G Σ min(s·A, clip(s, 1 − 3e-4, 1 + 4e-4)·A), s the geometric mean of the rollout's r."""
    return per_rollout(
        groups,
        lambda group, one: clipped(
            sequence_ratio(one) ** (1 / len(one)), normalised(group, one), low=1 - 3e-4, high=1 + 4e-4
        ),
    )


def luspo(groups: Groups) -> Tensor:
    """J = 1/G Σ |o_i|·min(s·A, clip(s, 1 − 2e-3, 1 + 2.5e-3)·A), s as in `gspo`."""
    return per_rollout(
        groups,
        lambda group, one: (
            len(one)
            * clipped(sequence_ratio(one) ** (1 / len(one)), normalised(group, one), low=1 - 2e-3, high=1 + 2.5e-3)
        ),
    )


def gmpo(groups: Groups) -> Tensor:
    """J = 1/G Σ (Π_t |min(r·A, clip(r, e^−0.4, e^0.4)·A)|)^(1/|o|)·sgn A, with |A| taken out of the product."""

    def term(group: list[Sequence], one: Sequence) -> Tensor:
        advantage = normalised(group, one)
        product = torch.ones((), dtype=torch.float64)
        for t in range(len(one)):
            surrogate = clipped(token_ratio(one, t), advantage, low=math.exp(-0.4), high=math.exp(0.4))
            product = product * torch.abs(surrogate)
        return product ** (1 / len(one)) * math.copysign(1.0, advantage)

    return per_rollout(groups, term)


def gfpo(groups: Groups) -> Tensor:
    """J = 1/Σ_g|o| Σ Σ min(r·A, clip(r)·A), summed over only the 8 shortest rollouts of each group."""
    kept = {id(one) for group in groups for one in sorted(group, key=len)[:8]}

    def term(group: list[Sequence], one: Sequence, t: int) -> Tensor:
        chosen = [other for other in group if id(other) in kept]
        advantage = normalised(chosen, one) if id(one) in kept else 0.0
        return clipped(token_ratio(one, t), advantage)

    return per_token(groups, lambda group, one: len(groups) * sum(len(other) for other in group), term)


def reinforce_plus_plus(groups: Groups) -> Tensor:
    """J = 1/G Σ 1/|o_i| Σ min(r·A, clip(r)·A) − 0.001·K2, with A = R − mean, whitened over the batch's tokens."""
    flat = [centred(group, one) for group in groups for one in group for _ in range(len(one))]
    centre, scale = mean(flat), std(flat) + 1e-6

    def term(group: list[Sequence], one: Sequence, t: int) -> Tensor:
        k2 = 0.5 * (one.theta[t] - one.ref[t]) ** 2
        return clipped(token_ratio(one, t), (centred(group, one) - centre) / scale) - 0.001 * k2

    return per_token(groups, lambda group, one: len(groups) * len(group) * len(one), term)


def decoupled_ppo(groups: Groups) -> Tensor:
    """J = mean over tokens of (π_old/μ)·min(u·A, clip(u)·A), u = π_θ/π_old; tokens with π_old/μ > 5 are excluded."""
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


def icepop(groups: Groups) -> Tensor:
    """J = 1/G Σ 1/|o_i| Σ M·min(u·A, clip(u)·A), u = π_θ/π_old; M = π_old/μ where that is in [0.5, 5], else 0."""
    return _of_the_note(lambda ratio: ratio if 0.5 <= ratio <= 5.0 else 0.0)(groups)


def deepseek_v32(groups: Groups) -> Tensor:
    """J = 1/G Σ 1/|o_i| Σ min(r·A, clip(r)·A)·M_i − 0.001·r·K3, with A = R − mean.

    M_i = 0 where A < 0 and mean_t log(μ/π_θ) > 0.5, else 1.
    """

    def term(group: list[Sequence], one: Sequence, t: int) -> Tensor:
        advantage, ratio = centred(group, one), token_ratio(one, t)
        drift = mean([one.mu[s] - one.theta[s].item() for s in range(len(one))])
        kept = 0.0 if advantage < 0 and drift > 0.5 else 1.0
        relative = torch.exp(one.ref[t] - one.theta[t])
        return clipped(ratio, advantage) * kept - 0.001 * ratio * (relative - torch.log(relative) - 1)

    return per_token(groups, lambda group, one: len(groups) * len(group) * len(one), term)


def _divergence(one: Sequence, t: int, advantage: float, bound: float) -> Tensor:
    """Return M·r·A of token t, with M = 0 where A > 0 and π − μ > bound, or A < 0 and π − μ < −bound, else 1."""
    change = math.exp(one.theta[t].item()) - math.exp(one.mu[t])
    outside = change > bound if advantage > 0 else change < -bound
    return (0.0 if outside else 1.0) * token_ratio(one, t) * advantage


def dppo_tv(groups: Groups) -> Tensor:
    """J = 1/(G·256) Σ Σ M·r·A, with the mask M of `_divergence` for the bound 0.15."""
    size = len(everyone(groups)) * 256.0
    return per_token(
        groups, lambda group, one: size, lambda group, one, t: _divergence(one, t, centred(group, one), 0.15)
    )


def prime_rl(groups: Groups) -> Tensor:
    """J = mean over tokens of M·r·A − 0.001·log²(π/μ), with the mask M of `_divergence` for the bound 0.2."""

    def term(group: list[Sequence], one: Sequence, t: int) -> Tensor:
        penalty = 0.001 * (one.theta[t] - one.mu[t]) ** 2
        return _divergence(one, t, centred(group, one), 0.2) - penalty

    return per_token(groups, lambda group, one: sum(len(other) for other in everyone(groups)), term)


def sapo(groups: Groups) -> Tensor:
    """J = 1/G Σ 1/|o_i| Σ (4/τ)·σ(τ·(r − 1))·A, τ = 1 where A > 0, else 1.05."""

    def term(group: list[Sequence], one: Sequence, t: int) -> Tensor:
        advantage = normalised(group, one)
        tau = 1.0 if advantage > 0 else 1.05
        return torch.sigmoid(tau * (token_ratio(one, t) - 1)) * 4 / tau * advantage

    return per_token(groups, lambda group, one: len(groups) * len(group) * len(one), term)


def cfpo(groups: Groups) -> Tensor:
    """J = 1/G Σ 1/|o_i| Σ r·A − |A|/(2·0.2)·(r − 1)²."""

    def term(group: list[Sequence], one: Sequence, t: int) -> Tensor:
        advantage, ratio = normalised(group, one), token_ratio(one, t)
        return ratio * advantage - abs(advantage) / 0.4 * (ratio - 1) ** 2

    return per_token(groups, lambda group, one: len(groups) * len(group) * len(one), term)


def vespo(groups: Groups) -> Tensor:
    """J = 1/Σ|o| Σ Σ sg[W^k·e^(λ(1 − W))]·A·log π, W = r_i; (k, λ) = (2, 3) where A ≥ 0, else (3, 2)."""

    def term(group: list[Sequence], one: Sequence, t: int) -> Tensor:
        advantage, ratio = normalised(group, one), sequence_ratio(one).item()
        k, decay = (2, 3) if advantage >= 0 else (3, 2)
        return ratio**k * math.exp(decay * (1 - ratio)) * advantage * one.theta[t]

    return per_token(groups, lambda group, one: sum(len(other) for other in everyone(groups)), term)


def sao(groups: Groups) -> Tensor:
    """J = mean over tokens of sg[f(r)]·A·log π, f(r) = r within (0.7, 6), else 0; A from GAE as in PPO."""
    found = whitened_gae(groups)

    def term(group: list[Sequence], one: Sequence, t: int) -> Tensor:
        ratio = token_ratio(one, t).item()
        return (ratio if 0.7 < ratio < 6.0 else 0.0) * found[id(one)][t] * one.theta[t]

    return per_token(groups, lambda group, one: sum(len(other) for other in everyone(groups)), term)


def maxrl(groups: Groups) -> Tensor:
    """J = (1/B) Σ sg[r]·(R − mean)/mean·log π, 0 for a group whose mean is not positive."""

    def term(group: list[Sequence], one: Sequence, t: int) -> Tensor:
        centre = mean([other.reward for other in group])
        advantage = (one.reward - centre) / centre if centre > 0 else 0.0
        return token_ratio(one, t).detach() * advantage * one.theta[t]

    return per_token(groups, lambda group, one: float(len(everyone(groups))), term)


def gdpo(groups: Groups) -> Tensor:
    """J of `grpo` with A = (Σ_n w_n·A_n − mean_batch)/std_batch, A_n normalised in the group for reward part n."""

    def of_part(group: list[Sequence], one: Sequence, n: int) -> float:
        earned = [other.parts[n][0] for other in group]
        return one.parts[n][1] * (one.parts[n][0] - mean(earned)) / (std(earned) + 1e-6)

    sums = {id(one): sum(of_part(group, one, n) for n in range(2)) for group in groups for one in group}
    centre, scale = mean(list(sums.values())), std(list(sums.values())) + 1e-6
    return per_token(
        groups,
        lambda group, one: len(groups) * len(group) * len(one),
        lambda group, one, t: clipped(token_ratio(one, t), (sums[id(one)] - centre) / scale),
    )


def dro(groups: Groups) -> Tensor:
    """J = mean over tokens of A·log π − (0.05/2)·log²(π/μ), A = R − mean."""
    return per_token(
        groups,
        lambda group, one: sum(len(other) for other in everyone(groups)),
        lambda group, one, t: centred(group, one) * one.theta[t] - 0.025 * (one.theta[t] - one.mu[t]) ** 2,
    )


def on_policy_distillation(groups: Groups) -> Tensor:
    """J = mean over tokens of r·sg[log π_teacher − log π]."""
    return per_token(
        groups,
        lambda group, one: sum(len(other) for other in everyone(groups)),
        lambda group, one, t: token_ratio(one, t) * (one.ref[t] - one.theta[t].item()),
    )


def rae(groups: Groups) -> Tensor:
    """J = 1/(B·256) Σ Σ min(r·A, clip(r)·A), A = R − b, then b ← 0.95·b + 0.05·R, rollout after rollout from b = 0."""
    found, baseline = {}, 0.0
    for one in everyone(groups):
        found[id(one)] = one.reward - baseline
        baseline = 0.95 * baseline + 0.05 * one.reward
    return per_token(
        groups,
        lambda group, one: 256.0 * len(everyone(groups)),
        lambda group, one, t: clipped(token_ratio(one, t), found[id(one)]),
    )


def _covariances(groups: Groups) -> list[tuple[float, int, int]]:
    """Return (A_t − mean A)·(log π_old − mean log π_old) of every token, with (rollout, token) indices."""
    flat = [
        (normalised(group, one), one.old[t], i * len(group) + j, t)
        for i, group in enumerate(groups)
        for j, one in enumerate(group)
        for t in range(len(one))
    ]
    centre, middle = mean([a for a, *_ in flat]), mean([old for _, old, *_ in flat])
    return [((a - centre) * (old - middle), number, t) for a, old, number, t in flat]


def clip_cov_candidates(groups: Groups) -> set[tuple[int, int]]:
    """Return the (rollout, token) indices of the tokens whose covariance is between 1 and 5."""
    return {(number, t) for cov, number, t in _covariances(groups) if 1.0 < cov < 5.0}


def clip_cov(groups: Groups, dropped: set[tuple[int, int]] = frozenset()) -> Tensor:  # type: ignore[assignment]
    """J = mean over tokens of min(u·A, clip(u)·A), u = π_θ/π_old, without the `dropped` (rollout, token) indices."""
    numbers = {id(one): number for number, one in enumerate(everyone(groups))}

    def term(group: list[Sequence], one: Sequence, t: int) -> Tensor:
        surrogate = clipped(torch.exp(one.theta[t] - one.old[t]), normalised(group, one))
        return surrogate * (0.0 if (numbers[id(one)], t) in dropped else 1.0)

    return per_token(groups, lambda group, one: sum(len(other) for other in everyone(groups)), term)


def kl_cov(groups: Groups) -> Tensor:
    """J = mean over tokens of u·A, minus |log π_θ − log π_old| for the max(1, 0.002·N) tokens of highest covariance."""
    found = sorted(_covariances(groups), reverse=True)
    chosen = {(number, t) for _, number, t in found[: max(1, int(0.002 * len(found)))]}
    numbers = {id(one): number for number, one in enumerate(everyone(groups))}

    def term(group: list[Sequence], one: Sequence, t: int) -> Tensor:
        difference = one.theta[t] - one.old[t]
        penalty = difference.abs() if (numbers[id(one)], t) in chosen else 0.0 * difference
        return torch.exp(difference) * normalised(group, one) - penalty

    return per_token(groups, lambda group, one: sum(len(other) for other in everyone(groups)), term)


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
    "ppo_dual_clip": ppo_dual_clip,
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
    "icepop": icepop,
    "deepseek_v32": deepseek_v32,
    "dppo_tv": dppo_tv,
    "prime_rl": prime_rl,
    "sapo": sapo,
    "cfpo": cfpo,
    "luspo": luspo,
    "vespo": vespo,
    "sao": sao,
    "maxrl": maxrl,
    "gdpo": gdpo,
    "rae": rae,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dro": dro,
    "on_policy_distillation": on_policy_distillation,
}
