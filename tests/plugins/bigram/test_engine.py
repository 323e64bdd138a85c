"""The bigram engine, loaded from its directory, and its sampler."""

import math
import shutil
from dataclasses import replace

import numpy as np
import pytest

from inference_contract.schemas import ChatCompletionRequest, ChatMessage
from pipelinerl.engines.batching.model_runner import RowState
from pipelinerl.engines.options import EngineOptions
from pipelinerl.enums import WeightFormat
from pipelinerl.errors import ModelError
from pipelinerl.plugins.bigram.engine import from_options, sample_rows
from pipelinerl.plugins.bigram.model import PARAMETER, BigramModel


@pytest.fixture
def options(tokenizer_directory, tokenizer, tmp_path):
    shutil.copytree(tokenizer_directory, tmp_path / "model")
    BigramModel.random(tokenizer.vocab_size, seed=0, context_length=64).save(tmp_path / "model")
    return EngineOptions(model_path=tmp_path / "model", model_id="b", slots=4, max_waiting=8, context_length=32)


async def test_bigram_engine_serves_the_model_in_its_directory(options):
    answers = []
    for _ in range(2):
        engine = from_options(options)
        await engine.start()
        request = ChatCompletionRequest(
            messages=[ChatMessage(role="user", content="hi")], n=2, max_tokens=4, return_token_ids=True
        )
        answers.append((await engine.complete(request)).choices)
        card = engine.model_card()
        await engine.close()
        assert [spec.name for spec in card.layout.parameters] == [PARAMETER]
        assert card.context_length == 32
    assert answers[0] == answers[1], "without a seed in the request the engine's own seed decides"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"dtype": "bfloat16"}, "float32 on the cpu"),
        ({"device": "cuda"}, "float32 on the cpu"),
        ({"weights": WeightFormat.INT8}, r"native weights only, .*engine\.weights=int8; leave it out"),
        ({"options": {"block_size": 1}}, r"the bigram engine has no options, got engine\.options block_size; remove"),
        ({"memory_share": 0.5}, r"the bigram engine uses no GPU memory, got engine\.memory_share=0\.5"),
    ],
)
def test_bigram_engine_rejects_unsupported_options(options, wrong, says):
    with pytest.raises(ModelError, match=says):
        from_options(replace(options, **wrong))


def _sampled(noise, **options_):
    logits = np.log(np.array([[4.0, 2.0, 1.0, 1.0]]))
    state = RowState(0, 0, 0, 0, **{"temperature": 1.0, "top_p": 1.0, "top_k": 0} | options_)
    token_ids, logprobs = sample_rows(logits, [state], np.array([noise]))
    return token_ids[0], math.exp(logprobs[0])


@pytest.mark.parametrize(
    ("noise", "options_", "token", "probability"),
    [
        (0.0, {}, 0, 1 / 2),
        (0.49, {}, 0, 1 / 2),
        (0.51, {}, 1, 1 / 4),
        (0.99, {}, 3, 1 / 8),
        (0.99, {"top_k": 2}, 1, 1 / 3),
        (0.66, {"top_k": 2}, 0, 2 / 3),
        (0.99, {"top_p": 0.6}, 1, 1 / 3),
        (0.99, {"top_p": 0.4}, 0, 1.0),
        # top-k leaves the probabilities 4/7, 2/7, 1/7; top-p keeps the first two, which reach 0.8.
        (0.99, {"top_k": 3, "top_p": 0.8}, 1, 1 / 3),
        # The policy's log-probs are those of all four tokens, and the dropped ones are still not sampled.
        (0.99, {"top_k": 2, "policy_logprobs": True}, 1, 1 / 4),
        (0.66, {"top_p": 0.6, "policy_logprobs": True}, 0, 1 / 2),
        (0.99, {"min_p": 0.5, "policy_logprobs": True}, 1, 1 / 4),
        # Temperature 1/2 squares the relative probabilities 4, 2, 1, 1 to 16, 4, 1, 1.
        (0.9, {"temperature": 0.5}, 1, 4 / 22),
        # Greedy sampling reports temperature 1, independent of the other parameters.
        (0.99, {"temperature": 0.0, "top_k": 1}, 0, 1 / 2),
    ],
)
def test_sampled_token_and_probability_match_precomputed_values(noise, options_, token, probability):
    assert _sampled(noise, **options_) == (token, pytest.approx(probability))


@pytest.mark.parametrize("wrong", [[math.nan] * 3, [0.0, math.nan, 1.0], [0.0, math.inf, 1.0], [-math.inf] * 3])
@pytest.mark.parametrize("options_", [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}])
def test_row_with_nonfinite_logits_gets_a_nan_logprob_and_other_rows_are_sampled(wrong, options_):
    logits = np.array([[0.0, 1.0, 2.0], wrong, [2.0, 1.0, 0.0]])
    chosen = {"temperature": 1.0, "top_p": 1.0, "top_k": 0} | options_
    states, noise = [RowState(row, 0, 0, 0, **chosen) for row in range(3)], np.array([0.3, 0.5, 0.7])
    token_ids, logprobs = sample_rows(logits, states, noise)
    assert token_ids[1] in range(3) and math.isnan(logprobs[1])
    healthy = sample_rows(logits[[0, 2]], states[::2], noise[[0, 2]])
    assert (token_ids[::2], logprobs[::2]) == healthy and all(map(math.isfinite, logprobs[::2]))
