"""Scoring returns the log-probs with which a row would sample the given tokens under the current weights."""

import numpy as np
import pytest

from pipelinerl.config.recipe import MODELS
from pipelinerl.engines.torch.engine import load_runner
from pipelinerl.enums import WeightFormat
from tests.fakes.engine_options import engine_options
from tests.fakes.torch_rows import Row, decode, start, swap
from trainer_contract.types import WeightDType

PROMPT = [5, 9, 3, 17]


def sampled(runner, temperature):
    row = Row(PROMPT, temperature, noise_key=7)
    start(runner, [row])
    decode(runner, [row], 12)
    runner.release([0])
    return row.sampled, row.logprobs


@pytest.mark.parametrize("weights", [WeightFormat.NATIVE, WeightFormat.INT8])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scored_tokens_have_the_logprobs_with_which_they_were_sampled(weights, temperature):
    options = engine_options(model_path=MODELS / "tiny_speller", dtype=WeightDType.FLOAT32, weights=weights)
    runner = load_runner(options)
    tokens, logprobs = sampled(runner, temperature)
    scored = runner.scorer([*PROMPT, *tokens], temperature)
    assert scored[0] == 0.0 and len(scored) == len(PROMPT) + len(tokens)
    np.testing.assert_allclose(scored[len(PROMPT) :], logprobs, atol=1e-5)
    assert runner.scorer([5], temperature) == [0.0]
    assert sampled(runner, temperature) == (tokens, logprobs), "scoring leaves rows and cache as they are"


def test_scored_logprobs_change_with_a_weight_update():
    runner = load_runner(engine_options(model_path=MODELS / "tiny_speller", dtype=WeightDType.FLOAT32))
    before = runner.scorer(PROMPT, 1.0)
    swap(runner, 0)  # with all weights 0, every token is equally likely
    scored = runner.scorer(PROMPT, 1.0)
    np.testing.assert_allclose(scored[1:], -np.log(runner.vocab_size), atol=1e-6)
    assert scored != before
