"""The objective's loss and gradient equal automatic differentiation, however rollouts are packed, split and ordered."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from pipelinerl.errors import ColumnError
from pipelinerl.objective import adv, agg, grad1, grad2, is_weight
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.presets import resolve
from pipelinerl.objective.tokens import COMPUTED_BY, Policy
from tests.objective.libraries import as_torch, in_jax, in_numpy, in_torch

WEIGHTS = (
    is_weight.Unweighted(),
    is_weight.TokenRatio(),
    is_weight.TokenRatio(low=0.8, high=1.2),
    is_weight.TokenRatio(high=1.5, numerator=Policy.OLD, outside=is_weight.Outside.MASK),
    is_weight.SequenceWeight(high=3.0),
    is_weight.SequenceWeight(mean=is_weight.Mean.GEOMETRIC, low=0.9, numerator=Policy.OLD),
    is_weight.ToprWeight(),
)
STEERED = (
    grad1.LogProb(),
    grad1.ClippedRatio(),
    grad1.ClippedRatio(epsilon_low=0.1, epsilon_high=math.inf, over=Policy.OLD),
    grad1.SequenceRatio(epsilon_low=0.1, epsilon_high=0.1),
    grad1.GeometricRatio(over=Policy.OLD),
)
REGULARIZERS = (
    grad2.NoRegularizer(),
    grad2.KLPenalty(beta=0.3),
    grad2.KLPenalty(beta=0.3, estimator=grad2.Estimator.K2),
    grad2.KLPenalty(beta=0.3, estimator=grad2.Estimator.K1),
    grad2.KLPenalty(beta=0.0),
    grad2.EntropyBonus(beta=0.2),
    grad2.ExactEntropy(beta=0.2),
    grad2.LogBarrier(beta=0.2),
)
#: Importance weights, loss terms and regularizers published in 2025 and 2026, in a few combinations with other kinds.
RECENT = (
    *((weight, grad1.LogProb(), grad2.NoRegularizer()) for weight in (is_weight.GammaWeight(),)),
    *(
        (weight, term, regularizer)
        for weight in (is_weight.Unweighted(), is_weight.TokenRatio(high=1.5, numerator=Policy.OLD))
        for regularizer in (grad2.NoRegularizer(), grad2.KLPenalty(beta=0.3))
        for term in (
            grad1.ClippedRatio(max_drift=0.05),
            grad1.DivergenceRatio(delta_low=0.05, delta_high=0.05),
            grad1.QuadraticRatio(over=Policy.OLD),
            grad1.SoftGate(positive=0.8, negative=3.0),
        )
    ),
    *(
        (weight, grad1.ClippedRatio(), regularizer)
        for weight in (is_weight.Unweighted(), is_weight.TokenRatio(numerator=Policy.OLD))
        for regularizer in (
            grad2.KLPenalty(beta=0.3, estimator=grad2.Estimator.K3_WEIGHTED),
            grad2.KLPenalty(beta=0.3, estimator=grad2.Estimator.K2, to=Policy.BEHAVIOR),
        )
    ),
)
OPTIONAL = {"old_logprobs", "ref_logprobs", "vocab_mean_logprobs", "vocab_entropies"}
OBJECTIVES = [
    PolicyObjective(agg=agg.Batch(), adv=adv.GroupRelative(), is_weight=w, grad1=g1, grad2=g2)
    for w, g1, g2 in (*RECENT, *itertools.product(WEIGHTS, STEERED, REGULARIZERS))
]


def select(columns, where, *, num_segments):
    kept = {name: column[where] for name, column in columns.items() if isinstance(column, np.ndarray)}
    return kept | {"num_segments": num_segments}


@pytest.mark.parametrize("objective", OBJECTIVES, ids=range(len(OBJECTIVES)))
def test_closed_form_gradient_equals_automatic_differentiation(objective, columns_of):
    logprobs, columns = columns_of(1)
    by_hand, automatic = in_numpy(objective, logprobs, columns), in_torch(objective, logprobs, columns)
    np.testing.assert_allclose(by_hand.gradient, automatic.gradient, rtol=0, atol=1e-12)
    assert np.abs(by_hand.gradient).max() > 0
    np.testing.assert_allclose(by_hand.loss, automatic.loss, rtol=1e-12)


ON_JAX = [*OBJECTIVES[: len(RECENT)], *OBJECTIVES[len(RECENT) :: 9]]


@pytest.mark.parametrize("objective", ON_JAX, ids=range(len(ON_JAX)))
def test_jax_gradient_equals_the_closed_form(objective, columns_of):
    logprobs, columns = columns_of(1)
    by_hand, automatic = in_numpy(objective, logprobs, columns), in_jax(objective, logprobs, columns)
    np.testing.assert_allclose(automatic.gradient, by_hand.gradient, rtol=0, atol=1e-9)
    np.testing.assert_allclose(automatic.loss, by_hand.loss, rtol=0, atol=1e-10)


@pytest.mark.parametrize("objective", OBJECTIVES[::7], ids=range(len(OBJECTIVES[::7])))
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_objective_in_single_precision_stays_in_single_precision(objective, library, columns_of):
    """The objective's constants, such as clip bounds, are Python numbers; they must not promote float32 to float64."""
    logprobs, columns = columns_of(1)
    narrow = {k: v.astype(np.float32) if v.dtype == float else v for k, v in _arrays(columns).items()}
    narrow |= {"segment_ids": columns["segment_ids"].astype(np.int32), "num_segments": columns["num_segments"]}
    current = logprobs.astype(np.float32)
    given = (torch.from_numpy(current), as_torch(narrow)) if library == "torch" else (current, narrow)
    assert "float32" in str(objective.evaluate(*given).dtype)
    assert "float32" in str(objective.prediction_gradient(*given).dtype)


def test_entropy_bonus_has_the_gradient_of_the_policys_entropy():
    """The sum of −(log π)²/2 over all tokens of a distribution, weighted by their probability, has the gradient ∇H."""
    logits = torch.tensor([0.3, -1.2, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    logprobs = torch.log_softmax(logits, 0)
    (wanted,) = torch.autograd.grad(-(logprobs.exp() * logprobs).sum(), logits, retain_graph=True)
    columns = {"loss_mask": torch.ones(4, dtype=torch.bool), "advantages": torch.zeros(4, dtype=torch.float64)}
    columns |= {"weights": logprobs.exp().detach(), "segment_ids": torch.arange(4), "num_segments": 4}
    objective = resolve({"preset": "pipelinerl", "is_weight": "one", "grad2": {"kind": "entropy", "beta": 1.0}})
    (got,) = torch.autograd.grad(-objective.evaluate(logprobs, columns), logits)
    np.testing.assert_allclose(got.numpy(), wanted.numpy(), atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_gradient_does_not_depend_on_how_rollouts_are_packed_split_and_ordered(data):
    seed = data.draw(st.integers(0, 10**6))
    objective = data.draw(st.sampled_from(OBJECTIVES))
    lengths = data.draw(st.lists(st.integers(1, 7), min_size=2, max_size=8))
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(1, len(lengths) - 1))
    logprobs, columns = _columns(seed, lengths)
    whole, slope = objective.evaluate(logprobs, columns), objective.prediction_gradient(logprobs, columns)
    loss, slopes = 0.0, np.zeros_like(slope)
    for part in (order[:cut], order[cut:]):
        where = np.concatenate([np.flatnonzero(columns["segment_ids"] == segment) for segment in part])
        piece = select(columns, where, num_segments=len(part))
        piece["segment_ids"] = np.repeat(np.arange(len(part)), [lengths[segment] for segment in part])
        loss += objective.evaluate(logprobs[where], piece)
        slopes[where] = objective.prediction_gradient(logprobs[where], piece)
    np.testing.assert_allclose(loss, whole, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(slopes, slope, rtol=1e-12)


def test_objective_declares_exactly_the_batch_columns_that_its_loss_reads(columns_of):
    logprobs, columns = columns_of(5)
    for objective in OBJECTIVES:
        offered = {k: v for k, v in columns.items() if k not in OPTIONAL - objective.needs}
        assert math.isfinite(objective.evaluate(logprobs, offered))
        for name in objective.needs:
            with pytest.raises(ColumnError, match=f"reads the column {name}, .* it is computed by {COMPUTED_BY[name]}"):
                objective.evaluate(logprobs, {k: v for k, v in offered.items() if k != name})


def _arrays(columns):
    return {name: column for name, column in columns.items() if isinstance(column, np.ndarray)}


def _columns(seed, lengths):
    """Build columns without the fixture `columns_of`, which hypothesis would share between examples."""
    draw = np.random.Generator(np.random.PCG64(seed))
    total = sum(lengths)
    mask = np.concatenate([np.arange(length) for length in lengths]) > 0
    logprobs = -draw.exponential(1.0, total)
    names = ("behavior_logprobs", *OPTIONAL)
    columns = {name: np.where(mask, logprobs + draw.normal(0, 0.5, total), 0.0) for name in names}
    columns |= {name: np.where(mask, draw.normal(size=total), 0.0) for name in ("advantages", "weights")}
    columns |= {"loss_mask": mask, "segment_ids": np.repeat(np.arange(len(lengths)), lengths)}
    return logprobs, columns | {"num_segments": len(lengths)}
