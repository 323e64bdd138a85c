"""The vectorised sampler agrees with the bigram engine's NumPy sampler."""

import numpy as np
import pytest
import torch

from pipelinerl import rng
from pipelinerl.engines.batching.logit_changes import LogitChange, LogitChanges
from pipelinerl.engines.batching.model_runner import RowState
from pipelinerl.engines.torch.sampling import add_to_logits, sample, sample_whole
from pipelinerl.plugins.bigram.engine import sample_rows


def _both(logits, temperature, top_k, top_p, min_p, noise):
    rows = len(temperature)
    policy = [row % 8 < 4 for row in range(rows)]
    names = ("temperature", "top_k", "top_p", "min_p", "policy_logprobs")
    columns = zip(temperature, top_k, top_p, min_p, policy, strict=True)
    states = [RowState(row, 0, 0, 0, **dict(zip(names, each, strict=True))) for row, each in enumerate(columns)]
    token_ids, logprobs, _, _ = sample(
        torch.from_numpy(logits).float(),
        min_p=torch.tensor(min_p) if any(min_p) else None,
        policy_logprobs=torch.tensor(policy),
        temperature=torch.tensor(temperature),
        top_k=torch.tensor(top_k),
        top_p=torch.tensor(top_p),
        noise=torch.from_numpy(noise),
    )
    return (token_ids.tolist(), logprobs.tolist()), sample_rows(logits, states, noise)


@pytest.mark.parametrize("vocab", [2, 50, 1024, 1025, 5000])
@pytest.mark.parametrize("kind", ["plain", "warm", "greedy", "top_k", "top_p", "min_p", "both", "mixed"])
def test_torch_sampler_agrees_with_the_numpy_sampler(vocab, kind):
    random = rng.generator(vocab, kind)
    rows = 64
    logits = np.float32(random.standard_normal((rows, vocab)) * 3).astype(np.float64)
    noise = random.random(rows)
    chosen = {
        "plain": ([1.0], [0], [1.0], [0.0]),
        "warm": ([0.3, 0.7, 2.5], [0], [1.0], [0.0]),
        "greedy": ([0.0], [3], [0.5], [0.0]),
        "top_k": ([1.0, 0.8], [1, 2, 7], [1.0], [0.0]),
        "top_p": ([1.0], [0], [0.1, 0.5, 0.9], [0.0]),
        "min_p": ([0.0, 1.0, 0.6], [0, 3], [1.0, 1.0, 1.0, 1.0, 0.8], [0.0, 0.3, 1.0, 0.02]),
        "both": ([0.7], [5], [0.8], [0.0]),
        "mixed": ([0.0, 1.0, 0.5], [0, 4, 0, 9], [1.0, 0.9, 0.3], [0.0]),
    }[kind]
    ours, plain = _both(logits, *([options[row % len(options)] for row in range(rows)] for options in chosen), noise)
    assert ours[0] == plain[0]
    assert ours[1] == pytest.approx(plain[1], abs=2e-5)


def test_top_logprobs_are_those_of_the_truncated_distribution():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 0.0, 0.0, 4.0]])
    drawn = sample(
        logits,
        temperature=torch.tensor([0.5, 1.0]),
        top_k=torch.tensor([2, 0]),
        top_p=torch.ones(2),
        noise=torch.tensor([0.999, 0.0], dtype=torch.float64),
        most_top=3,
    )
    assert drawn.top_ids is not None and drawn.top_logprobs is not None
    assert drawn.top_ids[0, :2].tolist() == [1, 3] and drawn.token_ids.tolist() == [3, 0]
    expected = torch.log_softmax(torch.tensor([6.0, 4.0]), 0).tolist()
    assert drawn.top_logprobs[0].tolist() == pytest.approx([*expected, -torch.inf])
    assert drawn.logprobs.tolist() == [drawn.top_logprobs[0, 1].item(), drawn.top_logprobs[1, 0].item()]


def test_logit_bias_and_penalties_are_added_to_their_rows_exactly_once():
    changes = LogitChanges()
    changes.place(1, LogitChange({2: 10.0, 0: -1.0}, 0.5, 0.25), [0, 0, 3])
    changed = add_to_logits(torch.zeros(2, 4, dtype=torch.bfloat16), changes)
    assert changed.tolist() == [[0.0] * 4, [-1.0 - 1.25, 0.0, 10.0, -0.75]]


@pytest.mark.parametrize("vocab", [8, 3000])
def test_sampler_never_draws_a_token_of_probability_zero_at_the_smallest_or_largest_noise(vocab):
    """Noise 0 draws the first token with non-zero probability, and the largest noise below 1 draws the last one."""
    logits = torch.full((2, vocab), -torch.inf)
    logits[:, 3] = logits[:, vocab - 2] = 0.0
    token_ids, logprobs, _, _ = sample(
        logits,
        temperature=torch.ones(2),
        top_k=torch.zeros(2, dtype=torch.int64),
        top_p=torch.ones(2),
        noise=torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64),
    )
    assert token_ids.tolist() == [3, vocab - 2]
    assert logprobs.tolist() == pytest.approx([np.log(0.5)] * 2)


@pytest.mark.parametrize("vocab", [50, 1025, 5000])
@pytest.mark.parametrize("wrong", [{0: np.nan}, {3: np.inf}, {3: np.inf, 7: np.nan}, {"all": np.nan}, {"all": -np.inf}])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.0, 0, 1.0), (0.7, 5, 1.0), (1.0, 0, 0.9)]
)
def test_row_with_nonfinite_logits_gets_a_nan_logprob_and_other_rows_are_sampled(
    vocab, wrong, temperature, top_k, top_p
):
    random = rng.generator(vocab, "not finite")
    logits = torch.from_numpy(random.standard_normal((3, vocab))).float()
    spoiled = logits.clone()
    for at, value in wrong.items():
        spoiled[1, slice(None) if at == "all" else at] = value
    options = {
        "temperature": torch.full((3,), temperature),
        "top_k": torch.full((3,), top_k),
        "top_p": torch.full((3,), top_p),
        "noise": torch.from_numpy(random.random(3)),
    }
    for of_policy in (False, True):
        flags = torch.full((3,), of_policy)
        token_ids, logprobs = sample(spoiled, policy_logprobs=flags, **options)[:2]
        healthy_ids, healthy_logprobs = sample(logits, policy_logprobs=flags, **options)[:2]
        assert token_ids[1] in range(vocab) and logprobs[1].isnan()
        assert token_ids[::2].tolist() == healthy_ids[::2].tolist()
        assert logprobs[::2].tolist() == healthy_logprobs[::2].tolist() and logprobs[::2].isfinite().all()


@pytest.mark.parametrize("vocab", [50, 5000])
def test_sampler_with_all_parameters_on_the_device_draws_the_same_tokens_as_with_host_parameters(vocab):
    """Some rows are greedy (temperature 0), and one row has NaN logits, which must not affect the other rows."""
    random = rng.generator(vocab, "whole")
    logits = torch.from_numpy(np.float32(random.standard_normal((64, vocab)) * 3))
    logits[5, 3] = torch.nan
    temperature = torch.tensor([0.0, 0.5, 1.0, 2.0] * 16)
    noise = torch.from_numpy(random.random(64))
    zeros = torch.zeros(64, dtype=torch.int64)
    expected = sample(logits, temperature=temperature, top_k=zeros, top_p=torch.ones(64), noise=noise)
    sampled = sample_whole(logits, temperature=temperature.double(), noise=noise)
    assert sampled.token_ids.tolist() == expected.token_ids.tolist()
    torch.testing.assert_close(sampled.logprobs, expected.logprobs, atol=1e-6, rtol=0, equal_nan=True)
