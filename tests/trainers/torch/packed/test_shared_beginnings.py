"""Shared prefixes of segments: the tokens that are computed, and unchanged results of passes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipelinerl.objective.presets import resolve
from pipelinerl.trainers.torch.packed.attention import Scores
from pipelinerl.trainers.torch.packed.segments import SegmentPlan
from pipelinerl.trainers.torch.packed.shared_beginnings import Distinct, Reading
from tests.fakes.torch_trainers import gradients, padded_twin, started

OBJECTIVE = resolve("pipelinerl")


def texts_of(batch, which):
    """Return, for each token index in `which`, the tokens of its segment up to and including the token."""
    start = np.maximum.accumulate(np.where(batch.position_ids == 0, np.arange(batch.num_tokens), 0))
    return [tuple(batch.token_ids[start[token] : token + 1]) for token in which]


def test_each_distinct_prefix_of_the_segments_in_a_batch_is_kept_once(shared, branching):
    for batch in (shared, branching):
        distinct, texts = Distinct.of(batch), texts_of(batch, np.arange(batch.num_tokens))
        assert len(distinct.kept) == len(set(texts)), "each node of the tree once"
        assert [texts[distinct.kept[place]] for place in distinct.place] == texts


def test_sampled_tokens_with_replayed_experts_are_not_deduplicated(micro_batch):
    batch = micro_batch((8, 8), select=[0, 0])
    first = int(np.flatnonzero(batch.loss_mask)[0])
    assert len(Distinct.of(batch).kept) == 8, "one answer twice"
    routed = replace(batch, routed_experts=np.zeros((16, 2, 1), np.int32))
    assert len(Distinct.of(routed).kept) == 16 - first, "two samplers may have sent it to different experts"


def test_prefix_of_a_single_shared_token_is_not_deduplicated(micro_batch):
    batch = micro_batch((40, 40, 9))
    tokens = batch.token_ids.copy()
    tokens[[0, 40, 80]] = 7, 7, 8
    assert len(Distinct.of(replace(batch, token_ids=tokens)).kept) == 89


@pytest.mark.parametrize("place", [[0], [0, 1, 2], [1, 0, 1], [3] * 7, [2, 5, 2, 2, 0, 5, 2, 2, 2, 2, 2, 2]])
def test_gradient_of_a_row_that_is_read_several_times_is_the_sum_over_its_readers(place):
    grad, device = torch.randn(len(place), 3, dtype=torch.float64), torch.device("cpu")
    index = torch.tensor(place)
    read = Reading.of(np.array(place), 6, device)
    computed = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    (got,) = torch.autograd.grad(read(computed), computed, grad)
    torch.testing.assert_close(got, torch.zeros_like(computed).index_add_(0, index, grad))
    assert len(read.sums.rounds) == int(np.ceil(np.log2(np.bincount(place).max()))), "as many as doublings"


@pytest.mark.parametrize("window", [None, 4])
def test_attention_over_shared_prefixes_matches_attention_over_repeated_prefixes(shared, window):
    distinct, device = Distinct.of(shared), torch.device("cpu")
    draw = torch.Generator().manual_seed(0)
    size = (len(distinct.kept), 2, 8)
    computed = [torch.randn(size, dtype=torch.float64, generator=draw, requires_grad=True) for _ in range(3)]
    place = torch.from_numpy(distinct.place)
    whole = [each[place] for each in computed]
    plan = SegmentPlan.of(shared.position_ids, device)
    wanted = plan.attend(*whole, Scores(window))[distinct.kept]
    cotangent = torch.randn(wanted.shape, dtype=torch.float64, generator=draw)
    expected = torch.autograd.grad(wanted, computed, cotangent)

    plan = SegmentPlan.of(shared.position_ids, device, distinct)
    got = plan.attend(*computed, Scores(window))
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
    for ours, theirs in zip(torch.autograd.grad(got, computed, cotangent), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gpt2"])
def test_step_with_shared_prefixes_matches_padded_rows(name, model_path, shared):
    is_the_padded_one(model_path(name), shared)


@pytest.mark.parametrize("hot", [1.0, 0.7])
def test_step_over_a_prefix_tree_matches_padded_rows(hot, model_path, branching):
    """The batch has equal answers sampled at different temperatures, whose log-probs differ."""
    temperatures = np.where(branching.segment_ids == 2, np.float32(hot), np.float32(1.0))
    is_the_padded_one(model_path("qwen3"), replace(branching, temperatures=temperatures))


def is_the_padded_one(path, batch):
    """Check that log-probs, loss and gradient match padded rows without sharing."""
    loss, logprobs, expected = padded_twin(path, batch)
    trainer = started(path)
    np.testing.assert_allclose(trainer.forward([batch])[0], logprobs, atol=2e-5)
    np.testing.assert_allclose(trainer.backward([batch], OBJECTIVE)[0].loss, loss, rtol=1e-4)
    got = gradients(trainer)
    for parameter, gradient in expected.items():
        torch.testing.assert_close(got[parameter], gradient, rtol=1e-3, atol=2e-5, msg=parameter)
