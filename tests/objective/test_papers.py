"""Every preset has, in numpy, torch and JAX, the gradient of its paper's surrogate, which torch differentiates."""

import numpy as np
import pytest
import torch

from pipelinerl.objective.catalogue import PRESETS
from pipelinerl.objective.presets import resolve
from pipelinerl.objective.reward import PartReward, Parts, Scored
from pipelinerl.objective.tokens import Tokens
from pipelinerl.rng import generator
from tests.objective.libraries import LIBRARIES, as_torch, in_numpy
from tests.objective.oracles import ORACLES, Sequence, clip_cov_candidates, clip_cov_without, everyone

GROUP_SIZE = 10
PROMPT = 2
VOCABULARY = 7
MAX_TOKENS = 256
SCORE_FUNCTIONS = {
    *("reinforce", "rloo", "reinforce_token", "pipelinerl", "cispo", "llamarl", "topr", "agarwal"),
    *("vespo", "sao", "maxrl", "dro", "on_policy_distillation"),
}
UNCLIPPED = SCORE_FUNCTIONS | {"sapo", "cfpo", "kl_cov"}
CAPPED = {"cispo", "llamarl", "topr", "decoupled_ppo", "ppo_tis", "icepop", "sao"}


def sampled(seed):
    """Return two groups of rollouts of different lengths; their policies differ enough to reach every clip and cap."""
    draw = generator(seed, "papers")

    def rollout():
        length = int(draw.integers(1, 7))
        mu = -draw.exponential(1.0, length)
        old = mu + draw.normal(0, 1.1, length)
        return Sequence(
            reward=float(draw.normal(0.3)),
            theta=torch.tensor(old + draw.normal(0, 0.3, length), requires_grad=True),
            mu=mu.tolist(),
            old=old.tolist(),
            ref=(mu + draw.normal(0, 0.5, length)).tolist(),
            values=draw.normal(size=length).tolist(),
            parts=[(float(draw.normal()), weight) for weight in (1.0, -0.5)],
            everything=torch.tensor(-draw.exponential(3.0, (length, VOCABULARY)), requires_grad=True),
        )

    return [[rollout() for _ in range(GROUP_SIZE)] for _ in range(2)]


def packed(groups, objective):
    """Pack the groups, with prompts, into one micro-batch; return its current log-probs and its columns.

    The objective itself computes the columns of advantages and weights, as in a training step.
    """
    rollouts = [one for group in groups for one in group]
    lengths = np.array([len(one) for one in rollouts])
    index, valid = np.repeat(np.arange(len(groups)), GROUP_SIZE), np.ones(len(rollouts), bool)

    def joined(parts):
        return np.concatenate([np.asarray(part, np.float64) for part in parts])

    sampled_only = {
        "behavior_logprobs": joined([one.mu for one in rollouts]),
        "old_logprobs": joined([one.old for one in rollouts]),
        "ref_logprobs": joined([one.ref for one in rollouts]),
        "values": joined([one.values for one in rollouts]),
        "vocab_mean_logprobs": joined([one.everything.detach().mean(dim=1) for one in rollouts]),
    }
    scored = Scored(
        rewards=np.array([one.reward for one in rollouts]),
        groups=index,
        lengths=lengths,
        valid=valid,
        parts=Parts.of(
            [[PartReward(str(n), *part) for n, part in enumerate(one.parts)] for one in rollouts],
            np.zeros(len(rollouts)),
        ),
    )
    known = {name: sampled_only[name] for name in objective.adv.needs}
    sampled_only["advantages"] = objective.adv.advantages(scored, known)
    sampled_only |= objective.grad2.choices(scored, sampled_only)
    weights = objective.agg.token_weights(lengths=lengths, groups=index, valid=valid)
    sampled_only["weights"] = np.repeat(weights, lengths)
    mask = np.concatenate([np.arange(PROMPT + length) >= PROMPT for length in lengths])
    columns = {"loss_mask": mask, "num_segments": len(rollouts)}
    columns["segment_ids"] = np.repeat(np.arange(len(rollouts)), lengths + PROMPT)
    for name, column in sampled_only.items():
        columns[name] = np.zeros(mask.shape)
        columns[name][mask] = column
    logprobs = np.full(mask.shape, -2.0)
    logprobs[mask] = joined([one.theta.detach() for one in rollouts])
    return logprobs, columns


def gradient_of(groups, name, columns=None):
    """Return −dJ / d log π_θ of the paper's surrogate, concatenated by rollout.

    Clip-Cov drops random tokens; the surrogate drops the same tokens, which have advantage 0 in `columns`.
    """
    surrogate = ORACLES[name](groups)
    if name == "clip_cov" and columns is not None:
        tokens = [(id(one), t) for one in everyone(groups) for t in range(len(one))]
        zero = columns["advantages"][columns["loss_mask"]] == 0
        dropped = {token for token, is_zero in zip(tokens, zero, strict=True) if is_zero}
        assert len(dropped) == 1 and dropped <= clip_cov_candidates(groups)
        surrogate = clip_cov_without(dropped)(groups)
    (-surrogate).backward()
    return np.concatenate([one.theta.grad.numpy() for group in groups for one in group])


def test_every_objective_preset_has_a_reference_implementation_of_its_papers_surrogate():
    assert set(ORACLES) == set(PRESETS)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", PRESETS)
def test_preset_gradient_equals_that_of_its_papers_surrogate(name, library):
    objective, groups = resolve(name, max_tokens=MAX_TOKENS), sampled(5)
    logprobs, columns = packed(groups, objective)
    wanted = gradient_of(groups, name, columns)
    loss, gradient = LIBRARIES[library](objective, logprobs, columns)
    mask = columns["loss_mask"]
    np.testing.assert_allclose(gradient[mask], wanted, rtol=0, atol=1e-9)
    assert (gradient[~mask] == 0).all()
    assert np.abs(wanted).max() > 1e-5, "something was compared"
    assert loss == pytest.approx(in_numpy(objective, logprobs, columns).loss, rel=0, abs=1e-10)


def test_log_barrier_of_the_agarwal_preset_has_a_gradient_for_every_token_of_the_vocabulary():
    """Check the closed-form gradient and torch's derivative with respect to the mean log-prob over the vocabulary."""
    objective, groups = resolve("agarwal", max_tokens=MAX_TOKENS), sampled(5)
    logprobs, columns = packed(groups, objective)
    gradient_of(groups, "agarwal")
    wanted = np.concatenate([one.everything.grad.numpy() for group in groups for one in group])
    (closed,) = objective.measure_gradients(logprobs, columns).values()
    mask = columns["loss_mask"]
    np.testing.assert_allclose(np.repeat(closed[mask, None] / VOCABULARY, VOCABULARY, 1), wanted, rtol=0, atol=1e-12)
    assert (closed[~mask] == 0).all() and np.abs(wanted).max() > 1e-8
    tensors = as_torch(columns)
    tensors["vocab_mean_logprobs"].requires_grad_()
    objective.evaluate(torch.from_numpy(logprobs), tensors).backward()
    np.testing.assert_allclose(tensors["vocab_mean_logprobs"].grad.numpy(), closed, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "name",
    [*sorted(UNCLIPPED - {"on_policy_distillation"}), "gmpo"],
)
def test_preset_that_does_not_clip_computes_the_loss_of_its_paper(name):
    """GMPO is included although it clips; distillation is excluded, since only its gradient equals the paper's."""
    objective, groups = resolve(name, max_tokens=MAX_TOKENS), sampled(6)
    logprobs, columns = packed(groups, objective)
    assert in_numpy(objective, logprobs, columns).loss == pytest.approx(-ORACLES[name](groups).item(), abs=1e-10)


@pytest.mark.parametrize("name", PRESETS)
def test_sampled_rollouts_reach_the_clip_bounds_and_the_importance_weight_cap_of_each_preset(name):
    """Otherwise the comparisons with the papers could pass because no ratio reaches a bound."""
    objective = resolve(name, max_tokens=MAX_TOKENS)
    logprobs, columns = packed(sampled(5), objective)
    tokens = Tokens.of(logprobs, columns)
    clipped, truncated = objective.grad1.clipped(tokens), objective.is_weight.truncated(tokens)
    assert clipped.any() == (name not in UNCLIPPED)
    assert truncated.any() == (name in CAPPED)
    assert not clipped[~tokens.inside].any() and not truncated[~tokens.inside].any()
