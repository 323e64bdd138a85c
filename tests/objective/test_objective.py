"""The objective against slow twins, automatic differentiation, and the property that matters: how the batch is packed,
split or ordered changes nothing.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from pipelinerl.objective import adv, agg, grad1, grad2, is_weight
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.presets import resolve
from pipelinerl.objective.tokens import Policy

WEIGHTS = (
    is_weight.One(),
    is_weight.TokenRatio(),
    is_weight.TokenRatio(low=0.8, high=1.2),
    is_weight.TokenRatio(high=1.5, numerator=Policy.OLD),
)
STEERED = (
    grad1.LogProb(),
    grad1.ClippedRatio(),
    grad1.ClippedRatio(epsilon_low=0.1, epsilon_high=math.inf, over=Policy.OLD),
)
REGULARIZERS = (
    grad2.Nothing(),
    grad2.KLPenalty(beta=0.3),
    grad2.KLPenalty(beta=0.3, estimator=grad2.Estimator.K2),
    grad2.KLPenalty(beta=0.0),
)
OBJECTIVES = [
    PolicyObjective(agg=agg.Batch(), adv=adv.GroupRelative(), is_weight=w, grad1=g1, grad2=g2)
    for w, g1, g2 in itertools.product(WEIGHTS, STEERED, REGULARIZERS)
]


def as_torch(columns):
    return {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in columns.items()}


def select(columns, where, *, num_segments):
    kept = {name: column[where] for name, column in columns.items() if isinstance(column, np.ndarray)}
    return kept | {"num_segments": num_segments}


@pytest.mark.parametrize("objective", OBJECTIVES, ids=range(len(OBJECTIVES)))
def test_closed_form_equals_automatic_differentiation(objective, columns_of):
    logprobs, columns = columns_of(1)
    variable = torch.from_numpy(logprobs).requires_grad_()
    loss = objective.evaluate(variable, as_torch(columns))
    loss.backward()
    closed = objective.logprob_gradient(logprobs, columns)
    np.testing.assert_allclose(closed, variable.grad.numpy(), rtol=0, atol=1e-12)
    assert np.abs(closed).max() > 0
    np.testing.assert_allclose(objective.evaluate(logprobs, columns), loss.item(), rtol=1e-12)


def test_grpo_equals_the_papers_formula_written_with_loops(columns_of):
    """DeepSeekMath Eq. 3: mean over groups, rollouts and tokens of min(r·A, clip(r)·A) − β·K3, and its gradient."""
    logprobs, columns = columns_of(2, lengths=(5, 4, 7, 3))
    rewards, groups = [1.0, 0.0, 0.5, 3.0], [0, 0, 1, 1]
    objective = resolve({"preset": "grpo", "adv": {"epsilon": 0.0}, "grad2": {"kind": "kl", "beta": 0.2}})
    ids, mask = columns["segment_ids"], columns["loss_mask"]
    variable = torch.from_numpy(logprobs).requires_grad_()
    wanted = torch.zeros((), dtype=torch.float64)
    for group in (0, 1):
        members = [i for i in range(4) if groups[i] == group]
        mean = sum(rewards[i] for i in members) / 2
        std = math.sqrt(sum((rewards[i] - mean) ** 2 for i in members) / 2)
        for i in members:
            tokens = [t for t in range(len(ids)) if ids[t] == i and mask[t]]
            for t in tokens:
                ratio = torch.exp(variable[t] - columns["behavior_logprobs"][t])
                a = (rewards[i] - mean) / std
                surrogate = torch.minimum(ratio * a, torch.clamp(ratio, 0.8, 1.2) * a)
                d = columns["ref_logprobs"][t] - variable[t]
                wanted = wanted - (surrogate - 0.2 * (torch.exp(d) - d - 1)) / (2 * 2 * len(tokens))
    wanted.backward()

    everyone = np.ones(4, dtype=bool)
    lengths = np.array([(mask & (ids == i)).sum() for i in range(4)])
    a = objective.adv.advantages(rewards=np.array(rewards), groups=np.array(groups), valid=everyone)
    w = objective.agg.token_weights(lengths=lengths, groups=np.array(groups), valid=everyone)
    columns |= {"advantages": np.where(mask, a[ids], 0.0), "weights": np.where(mask, w[ids], 0.0)}
    np.testing.assert_allclose(objective.logprob_gradient(logprobs, columns), variable.grad.numpy(), atol=1e-12)


def test_pipelinerl_equals_the_posts_description_written_with_loops(columns_of):
    """−(1/B) Σ sg[min(r, C)]·A·log π: every token alike, the number of sequences the only denominator."""
    logprobs, columns = columns_of(3, lengths=(5, 4, 7))
    objective = resolve({"preset": "pipelinerl", "is_weight": {"high": 1.3}})
    ids, mask, a = columns["segment_ids"], columns["loss_mask"], [1.0, -1.0, 0.5]
    loss, slope = 0.0, np.zeros_like(logprobs)
    for t in range(len(ids)):
        if mask[t]:
            weight = min(math.exp(logprobs[t] - columns["behavior_logprobs"][t]), 1.3)
            loss -= weight * a[ids[t]] * logprobs[t] / 3
            slope[t] = -weight * a[ids[t]] / 3
    lengths = np.array([(mask & (ids == i)).sum() for i in range(3)])
    w = objective.agg.token_weights(lengths=lengths, groups=np.zeros(3, int), valid=np.ones(3, bool))
    columns |= {"advantages": np.where(mask, np.array(a)[ids], 0.0), "weights": np.where(mask, w[ids], 0.0)}
    np.testing.assert_allclose(objective.evaluate(logprobs, columns), loss, rtol=1e-12)
    np.testing.assert_allclose(objective.logprob_gradient(logprobs, columns), slope, rtol=1e-12)


def test_k3_is_of_reference_over_current():
    """GRPO Eq. 4 with π_ref/π_θ = 2: 2 − ln 2 − 1. The other way round it would be 0.5 + ln 2 − 1."""
    columns = {name: np.zeros(1) for name in ("behavior_logprobs", "advantages")}
    columns |= {"weights": np.ones(1), "loss_mask": np.ones(1, bool), "ref_logprobs": np.array([math.log(0.5)])}
    columns |= {"segment_ids": np.zeros(1, int), "num_segments": 1}
    objective = resolve({"preset": "grpo", "grad2": {"kind": "kl", "beta": 1.0}})
    loss = objective.evaluate(np.array([math.log(0.25)]), columns)
    np.testing.assert_allclose(loss, 1.0 - math.log(2.0))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_packing_splitting_and_order_change_nothing(data):
    seed = data.draw(st.integers(0, 10**6))
    objective = data.draw(st.sampled_from(OBJECTIVES))
    lengths = data.draw(st.lists(st.integers(1, 7), min_size=2, max_size=8))
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(1, len(lengths) - 1))
    logprobs, columns = _columns(seed, lengths)
    whole, slope = objective.evaluate(logprobs, columns), objective.logprob_gradient(logprobs, columns)
    loss, slopes = 0.0, np.zeros_like(slope)
    for part in (order[:cut], order[cut:]):
        where = np.concatenate([np.flatnonzero(columns["segment_ids"] == segment) for segment in part])
        piece = select(columns, where, num_segments=len(part))
        piece["segment_ids"] = np.repeat(np.arange(len(part)), [lengths[segment] for segment in part])
        loss += objective.evaluate(logprobs[where], piece)
        slopes[where] = objective.logprob_gradient(logprobs[where], piece)
    np.testing.assert_allclose(loss, whole, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(slopes, slope, rtol=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES[::5], ids=range(len(OBJECTIVES[::5])))
def test_what_lies_outside_the_mask_does_not_matter(objective, columns_of):
    logprobs, columns = columns_of(4)
    inside = columns["loss_mask"]
    expected = objective.evaluate(logprobs, columns)
    dropped = objective.evaluate(logprobs[inside], select(columns, inside, num_segments=columns["num_segments"]))
    np.testing.assert_allclose(dropped, expected, rtol=1e-12)
    poison = {k: np.where(inside, v, np.nan) if v.dtype == float else v for k, v in _arrays(columns).items()}
    variable = torch.from_numpy(np.where(inside, logprobs, -np.inf)).requires_grad_()
    loss = objective.evaluate(variable, as_torch(poison) | {"num_segments": columns["num_segments"]})
    loss.backward()
    np.testing.assert_allclose(loss.item(), expected, rtol=1e-12)
    assert (variable.grad.numpy()[~inside] == 0).all() and np.isfinite(variable.grad.numpy()).all()


def test_it_asks_for_exactly_the_columns_it_reads(columns_of):
    logprobs, columns = columns_of(5)
    for objective in OBJECTIVES:
        offered = {k: v for k, v in columns.items() if k not in {"old_logprobs", "ref_logprobs"} - objective.needs}
        assert math.isfinite(objective.evaluate(logprobs, offered))
        for name in objective.needs:
            with pytest.raises(KeyError):
                objective.evaluate(logprobs, {k: v for k, v in offered.items() if k != name})


def _arrays(columns):
    return {name: column for name, column in columns.items() if isinstance(column, np.ndarray)}


def _columns(seed, lengths):
    """`columns_of` without the fixture, which hypothesis would share between examples."""
    draw = np.random.Generator(np.random.PCG64(seed))
    total = sum(lengths)
    mask = np.concatenate([np.arange(length) for length in lengths]) > 0
    logprobs = -draw.exponential(1.0, total)
    names = ("behavior_logprobs", "old_logprobs", "ref_logprobs")
    columns = {name: np.where(mask, logprobs + draw.normal(0, 0.5, total), 0.0) for name in names}
    columns |= {name: np.where(mask, draw.normal(size=total), 0.0) for name in ("advantages", "weights")}
    columns |= {"loss_mask": mask, "segment_ids": np.repeat(np.arange(len(lengths)), lengths)}
    return logprobs, columns | {"num_segments": len(lengths)}
