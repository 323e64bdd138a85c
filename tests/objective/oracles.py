"""Oracles: the surrogate objectives J of the papers, each written from its printed formula as loops over tokens.

No code is shared with the objective under test: torch differentiates each formula as printed. J is maximised. The lists
of a rollout cover only its sampled tokens. `theta` are the current log-probs, differentiable; `mu` the sampler's; `old`
the recomputed ones; `ref` the reference's. In the formulas, r = π_θ/μ is the ratio of a token, and r_i that of a whole
rollout o_i; u = π_θ/π_old; R is the reward, A the advantage, |o_i| the rollout's length, G the number of rollouts in a
group, B and N the numbers of rollouts and tokens in the batch; sg stops the gradient, σ is the sigmoid, and K2 and K3
estimate the KL.

A function below is the term of one token or rollout; its decorator names the denominator and makes J of it.
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
#: The surrogates by preset.
ORACLES: dict[str, Callable[[Groups], Tensor]] = {}


def mean(numbers):
    return sum(numbers) / len(numbers)


def std(numbers):
    return math.sqrt(mean([(x - mean(numbers)) ** 2 for x in numbers]))


def everyone(groups):
    return [one for group in groups for one in group]


def centred(group, one):
    return one.reward - mean([other.reward for other in group])


def normalised(group, one):
    return centred(group, one) / (std([other.reward for other in group]) + 1e-6)


def ratio(one, t):
    return torch.exp(one.theta[t] - one.mu[t])


def ratio_to_old(one, t):
    return torch.exp(one.theta[t] - one.old[t])


def sequence_ratio(one):
    """Return the ratio of a whole rollout, Π_t π_θ/μ."""
    product = torch.ones((), dtype=torch.float64)
    for t in range(len(one)):
        product = product * ratio(one, t)
    return product


def clipped(ratio, advantage, low=0.8, high=1.2):
    """Return PPO's clipped term, min(r·A, clip(r, low, high)·A)."""
    return torch.minimum(ratio * advantage, torch.clamp(ratio, low, high) * advantage)


def k3(one, t):
    """Return K3 of the KL to the reference, with the ratio π_ref/π_θ."""
    relative = torch.exp(one.ref[t] - one.theta[t])
    return relative - torch.log(relative) - 1


# --- denominators -----------------------------------------------------------------------------------------------------


def by_trajectory(groups, group, one):
    """Q·G·|o_i|"""
    return len(groups) * len(group) * len(one)


def by_group(groups, group, one):
    """Q·Σ_g |o|"""
    return len(groups) * sum(len(other) for other in group)


def by_batch(groups, group, one):
    """N"""
    return sum(len(other) for other in everyone(groups))


def by_sequences(groups, group, one):
    """B"""
    return float(len(everyone(groups)))


def by_max_tokens(groups, group, one):
    """B·L_max, L_max = 256"""
    return len(everyone(groups)) * 256.0


def per_token(denominator, given=None):
    """Make J of a token's term: the sum of term(group, rollout, t) / denominator over all tokens.

    `given` computes, once from all groups, what the term gets as its last argument.
    """

    def decorate(term):
        def surrogate(groups):
            known = () if given is None else (given(groups),)
            total = torch.zeros((), dtype=torch.float64)
            for group in groups:
                for one in group:
                    for t in range(len(one)):
                        total = total + term(group, one, t, *known) / denominator(groups, group, one)
            return total

        return registered(term.__name__, surrogate)

    return decorate


def registered(name, surrogate):
    if not name.startswith("_"):
        ORACLES[name] = surrogate
    return surrogate


def per_rollout(term):
    """Make J of a rollout's term: the mean over groups of the mean of term(group, rollout) over its rollouts."""

    def surrogate(groups):
        total = torch.zeros((), dtype=torch.float64)
        for group in groups:
            for one in group:
                total = total + term(group, one) / (len(groups) * len(group))
        return total

    return registered(term.__name__, surrogate)


# --- score functions --------------------------------------------------------------------------------------------------


@per_rollout
def reinforce(group, one):
    """J = (1/G) Σ sg[r_i]·A_i·log π(o_i)."""
    return sequence_ratio(one).detach() * centred(group, one) * one.theta.sum()


@per_rollout
def rloo(group, one):
    """J = (1/G) Σ sg[r_i]·(R_i − mean of the group's other rewards)·log π(o_i)."""
    others = [other.reward for other in group if other is not one]
    return sequence_ratio(one).detach() * (one.reward - mean(others)) * one.theta.sum()


@per_token(by_max_tokens)
def reinforce_token(group, one, t):
    """J = 1/(G·L_max) Σ Σ sg[r]·A·log π, L_max = 256."""
    return ratio(one, t).detach() * centred(group, one) * one.theta[t]


@per_token(by_max_tokens)
def agarwal(group, one, t):
    """J of `reinforce_token`, plus sg[r]·(λ/V) Σ_a log π(a|s) in every state, over V tokens a, λ = 0.001."""
    total = torch.zeros((), dtype=torch.float64)
    for action in one.everything[t]:
        total = total + action
    barrier = 0.001 * total / len(one.everything[t])
    return ratio(one, t).detach() * (centred(group, one) * one.theta[t] + barrier)


@per_token(by_sequences)
def pipelinerl(group, one, t):
    """J = (1/B) Σ sg[r]·A·log π."""
    return ratio(one, t).detach() * normalised(group, one) * one.theta[t]


@per_token(by_group)
def cispo(group, one, t):
    """J = 1/Σ_g|o| Σ Σ sg[min(r, 5)]·A·log π."""
    return min(ratio(one, t).item(), 5.0) * normalised(group, one) * one.theta[t]


@per_token(by_sequences)
def llamarl(group, one, t):
    """J = (1/B) Σ sg[min(π/μ, 4)]·A·log π."""
    return min(ratio(one, t).item(), 4.0) * centred(group, one) * one.theta[t]


@per_rollout
def topr(group, one):
    """J = Σ_{A ≥ 0} A·log π(o_i) + Σ_{A < 0} c·A·log π(o_i), where c is r_i clipped to [0, 1]."""
    advantage = centred(group, one)
    weight = 1.0 if advantage >= 0 else min(max(sequence_ratio(one).item(), 0.0), 1.0)
    return weight * advantage * one.theta.sum()


# --- clipped ratios ---------------------------------------------------------------------------------------------------


def whitened_gae(groups):
    """Return GAE(γ = 1, λ = 0.95) of each rollout's tokens, whitened over all tokens, by the rollout's id."""
    raw = {}
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


@per_token(by_trajectory, whitened_gae)
def ppo(group, one, t, advantages):
    """J = 1/G Σ 1/|o_i| Σ min(r·A, clip(r)·A), with advantages from `whitened_gae`."""
    return clipped(ratio(one, t), advantages[id(one)][t])


@per_token(by_batch)
def ppo_dual_clip(group, one, t):
    """J = (1/N) Σ max(min(r·A, clip(r, 1 ± 0.2)·A), 3·A) where A < 0, and PPO's min elsewhere."""
    advantage = normalised(group, one)
    surrogate = clipped(ratio(one, t), advantage)
    return torch.maximum(surrogate, torch.tensor(3.0 * advantage)) if advantage < 0 else surrogate


@per_token(by_trajectory)
def grpo(group, one, t):
    """J = 1/G Σ 1/|o_i| Σ min(r·A, clip(r)·A)."""
    return clipped(ratio(one, t), normalised(group, one))


ORACLES["ppo_is"] = grpo


@per_token(by_trajectory)
def grpo_kl(group, one, t):
    """J of `grpo`, minus 0.04·K3 of the KL to the reference."""
    return clipped(ratio(one, t), normalised(group, one)) - 0.04 * k3(one, t)


@per_token(by_group)
def dapo(group, one, t):
    """J = 1/Σ_g|o| Σ Σ min(r·A, clip(r, 0.8, 1.28)·A)."""
    return clipped(ratio(one, t), normalised(group, one), high=1.28)


@per_token(by_max_tokens)
def dr_grpo(group, one, t):
    """J = 1/(G·256) Σ Σ min(r·A, clip(r)·A), A = R − mean."""
    return clipped(ratio(one, t), centred(group, one))


@per_rollout
def gspo(group, one):
    """J = 1/G Σ min(s·A, clip(s, 1 − 3e-4, 1 + 4e-4)·A), s the geometric mean of the rollout's r."""
    return clipped(sequence_ratio(one) ** (1 / len(one)), normalised(group, one), low=1 - 3e-4, high=1 + 4e-4)


@per_rollout
def luspo(group, one):
    """J = 1/G Σ |o_i|·min(s·A, clip(s, 1 − 2e-3, 1 + 2.5e-3)·A), s as in `gspo`."""
    mean_ratio = sequence_ratio(one) ** (1 / len(one))
    return len(one) * clipped(mean_ratio, normalised(group, one), low=1 - 2e-3, high=1 + 2.5e-3)


@per_rollout
def gmpo(group, one):
    """J = 1/G Σ (Π_t |min(r·A, clip(r, e^−0.4, e^0.4)·A)|)^(1/|o|)·sgn A, with |A| taken out of the product."""
    advantage = normalised(group, one)
    product = torch.ones((), dtype=torch.float64)
    for t in range(len(one)):
        product = product * torch.abs(clipped(ratio(one, t), advantage, low=math.exp(-0.4), high=math.exp(0.4)))
    return product ** (1 / len(one)) * math.copysign(1.0, advantage)


@per_token(by_group)
def gfpo(group, one, t):
    """J = 1/Σ_g|o| Σ Σ min(r·A, clip(r)·A), summed over only the 8 shortest rollouts of each group."""
    kept = sorted(group, key=len)[:8]
    return clipped(ratio(one, t), normalised(kept, one) if any(one is other for other in kept) else 0.0)


def batch_centred(groups):
    """Return mean and deviation of R − mean over the batch's tokens."""
    flat = [centred(group, one) for group in groups for one in group for _ in range(len(one))]
    return mean(flat), std(flat) + 1e-6


@per_token(by_trajectory, batch_centred)
def reinforce_plus_plus(group, one, t, batch):
    """J = 1/G Σ 1/|o_i| Σ min(r·A, clip(r)·A) − 0.001·K2, with A = R − mean, whitened over the batch's tokens."""
    k2 = 0.5 * (one.theta[t] - one.ref[t]) ** 2
    return clipped(ratio(one, t), (centred(group, one) - batch[0]) / batch[1]) - 0.001 * k2


def batch_rewards(groups):
    """Return mean and deviation of R over the batch's tokens."""
    flat = [one.reward for one in everyone(groups) for _ in range(len(one))]
    return mean(flat), std(flat) + 1e-8


@per_token(by_batch, batch_rewards)
def decoupled_ppo(group, one, t, batch):
    """J = mean over tokens of (π_old/μ)·min(u·A, clip(u)·A); tokens with π_old/μ > 5 are excluded."""
    weight = math.exp(one.old[t] - one.mu[t])
    surrogate = clipped(ratio_to_old(one, t), (one.reward - batch[0]) / batch[1])
    return (weight if weight <= 5.0 else 0.0) * surrogate


def _of_the_note(name, weight):
    """J = 1/G Σ 1/|o_i| Σ weight(π_old/μ)·min(u·A, clip(u)·A)."""

    def term(group, one, t):
        return weight(math.exp(one.old[t] - one.mu[t])) * clipped(ratio_to_old(one, t), normalised(group, one))

    term.__name__ = name
    per_token(by_trajectory)(term)


_of_the_note("ppo_recomputed", lambda ratio: 1.0)
_of_the_note("ppo_tis", lambda ratio: min(ratio, 2.0))
_of_the_note("ppo_vanilla_is", lambda ratio: ratio)
_of_the_note("icepop", lambda ratio: ratio if 0.5 <= ratio <= 5.0 else 0.0)


# --- recent -----------------------------------------------------------------------------------------------------------


@per_token(by_trajectory)
def deepseek_v32(group, one, t):
    """J = 1/G Σ 1/|o_i| Σ min(r·A, clip(r)·A)·M_i − 0.001·r·K3, with A = R − mean.

    M_i = 0 where A < 0 and mean_t log(μ/π_θ) > 0.5, else 1.
    """
    advantage = centred(group, one)
    drift = mean([one.mu[s] - one.theta[s].item() for s in range(len(one))])
    kept = 0.0 if advantage < 0 and drift > 0.5 else 1.0
    return clipped(ratio(one, t), advantage) * kept - 0.001 * ratio(one, t) * k3(one, t)


def divergence(one, t, advantage, bound):
    """Return M·r·A of token t, with M = 0 where A > 0 and π − μ > bound, or A < 0 and π − μ < −bound, else 1."""
    change = math.exp(one.theta[t].item()) - math.exp(one.mu[t])
    outside = change > bound if advantage > 0 else change < -bound
    return (0.0 if outside else 1.0) * ratio(one, t) * advantage


@per_token(by_max_tokens)
def dppo_tv(group, one, t):
    """J = 1/(G·256) Σ Σ M·r·A, with the mask M of `divergence` for the bound 0.15."""
    return divergence(one, t, centred(group, one), 0.15)


@per_token(by_batch)
def prime_rl(group, one, t):
    """J = mean over tokens of M·r·A − 0.001·log²(π/μ), with the mask M of `divergence` for the bound 0.2."""
    return divergence(one, t, centred(group, one), 0.2) - 0.001 * (one.theta[t] - one.mu[t]) ** 2


@per_token(by_trajectory)
def sapo(group, one, t):
    """J = 1/G Σ 1/|o_i| Σ (4/τ)·σ(τ·(r − 1))·A, τ = 1 where A > 0, else 1.05."""
    advantage = normalised(group, one)
    tau = 1.0 if advantage > 0 else 1.05
    return torch.sigmoid(tau * (ratio(one, t) - 1)) * 4 / tau * advantage


@per_token(by_trajectory)
def cfpo(group, one, t):
    """J = 1/G Σ 1/|o_i| Σ r·A − |A|/(2·0.2)·(r − 1)²."""
    advantage = normalised(group, one)
    return ratio(one, t) * advantage - abs(advantage) / 0.4 * (ratio(one, t) - 1) ** 2


@per_token(by_batch)
def vespo(group, one, t):
    """J = 1/Σ|o| Σ Σ sg[W^k·e^(λ(1 − W))]·A·log π, W = r_i; (k, λ) = (2, 3) where A ≥ 0, else (3, 2)."""
    advantage, whole = normalised(group, one), sequence_ratio(one).item()
    k, decay = (2, 3) if advantage >= 0 else (3, 2)
    return whole**k * math.exp(decay * (1 - whole)) * advantage * one.theta[t]


@per_token(by_batch, whitened_gae)
def sao(group, one, t, advantages):
    """J = mean over tokens of sg[f(r)]·A·log π, f(r) = r within (0.7, 6), else 0; A from GAE as in PPO."""
    weight = ratio(one, t).item()
    return (weight if 0.7 < weight < 6.0 else 0.0) * advantages[id(one)][t] * one.theta[t]


@per_token(by_sequences)
def maxrl(group, one, t):
    """J = (1/B) Σ sg[r]·(R − mean)/mean·log π, 0 for a group whose mean is not positive."""
    centre = mean([other.reward for other in group])
    advantage = (one.reward - centre) / centre if centre > 0 else 0.0
    return ratio(one, t).detach() * advantage * one.theta[t]


def decoupled_parts(groups):
    """Return Σ_n w_n·A_n by the rollout's id, whitened over the batch; A_n is normalised in the group for part n."""

    def of_part(group, one, n):
        earned = [other.parts[n][0] for other in group]
        return one.parts[n][1] * (one.parts[n][0] - mean(earned)) / (std(earned) + 1e-6)

    sums = {id(one): sum(of_part(group, one, n) for n in range(2)) for group in groups for one in group}
    centre, scale = mean(list(sums.values())), std(list(sums.values())) + 1e-6
    return {name: (total - centre) / scale for name, total in sums.items()}


@per_token(by_trajectory, decoupled_parts)
def gdpo(group, one, t, advantages):
    """J of `grpo` with the advantages of `decoupled_parts`."""
    return clipped(ratio(one, t), advantages[id(one)])


@per_token(by_batch)
def dro(group, one, t):
    """J = mean over tokens of A·log π − (0.05/2)·log²(π/μ), A = R − mean."""
    return centred(group, one) * one.theta[t] - 0.025 * (one.theta[t] - one.mu[t]) ** 2


@per_token(by_batch)
def on_policy_distillation(group, one, t):
    """J = mean over tokens of r·sg[log π_teacher − log π]."""
    return ratio(one, t) * (one.ref[t] - one.theta[t].item())


def running_baseline(groups):
    """Return R − b by the rollout's id, then b ← 0.95·b + 0.05·R, rollout after rollout from b = 0."""
    found, baseline = {}, 0.0
    for one in everyone(groups):
        found[id(one)] = one.reward - baseline
        baseline = 0.95 * baseline + 0.05 * one.reward
    return found


@per_token(by_max_tokens, running_baseline)
def rae(group, one, t, advantages):
    """J = 1/(B·256) Σ Σ min(r·A, clip(r)·A), with the advantages of `running_baseline`."""
    return clipped(ratio(one, t), advantages[id(one)])


def covariances(groups):
    """Return (A_t − mean A)·(log π_old − mean log π_old) of every token, by (rollout's id, token)."""
    flat = {
        (id(one), t): (normalised(group, one), one.old[t]) for group in groups for one in group for t in range(len(one))
    }
    centre, middle = mean([a for a, _ in flat.values()]), mean([old for _, old in flat.values()])
    return {key: (a - centre) * (old - middle) for key, (a, old) in flat.items()}


def clip_cov_candidates(groups):
    """Return the tokens, by (rollout's id, token), whose covariance is between 1 and 5."""
    return {key for key, covariance in covariances(groups).items() if 1.0 < covariance < 5.0}


def clip_cov_without(dropped):
    """Make J = mean over tokens of min(u·A, clip(u)·A), without the tokens `dropped`, by (rollout's id, token)."""

    @per_token(by_batch)
    def _surrogate(group, one, t):
        kept = 0.0 if (id(one), t) in dropped else 1.0
        return clipped(ratio_to_old(one, t), normalised(group, one)) * kept

    return _surrogate


ORACLES["clip_cov"] = clip_cov_without(set())


def of_highest_covariance(groups):
    """Return the max(1, 0.002·N) tokens of highest covariance, by (rollout's id, token)."""
    found = covariances(groups)
    return set(sorted(found, key=found.__getitem__, reverse=True)[: max(1, int(0.002 * len(found)))])


@per_token(by_batch, of_highest_covariance)
def kl_cov(group, one, t, chosen):
    """J = mean over tokens of u·A, minus |log π_θ − log π_old| for the tokens `of_highest_covariance`."""
    difference = one.theta[t] - one.old[t]
    penalty = difference.abs() if (id(one), t) in chosen else 0.0 * difference
    return ratio_to_old(one, t) * normalised(group, one) - penalty
