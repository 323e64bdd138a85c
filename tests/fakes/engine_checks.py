"""Checks of engines of any array library: which weights sample a token during an update, and prompts with NaN."""

import asyncio
from typing import Final

import pytest
import torch
from transformers import AutoModelForCausalLM

from inference_contract.errors import NotFinite
from inference_contract.schemas import ChatCompletion, ChatCompletionRequest, EngineState
from inference_contract.weights import OnUpdate
from tests.patience import PATIENCE_S, SOON_S

PROMPT: Final = [7, 8, 9, 10]
#: Id of the token whose embedding is NaN.
SPOILED: Final = 8


async def samples_across_an_update(gate, engine, model_path, on_update, *, factor, tolerance, as_bytes, early=False):
    """Assert that the old weights sample every token before the switch, and the new weights every later one.

    In an update mode that keeps the KV cache, the later log-probs must differ from those of the new model.

    Args:
        factor: ratio of the new model's weights to those in `model_path`, which the engine serves.
        tolerance: the largest difference at which log-probs count as equal.
        as_bytes: converts the parameters of a model to the bytes that `staging` receives.
        early: True if the engine may have started a step before the switch whose tokens it returns after it.
    """
    old, new = (AutoModelForCausalLM.from_pretrained(model_path) for _ in range(2))
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(factor)
    request = ChatCompletionRequest(prompt_token_ids=PROMPT, n=4, max_tokens=20, seed=1, return_token_ids=True)
    task = asyncio.create_task(engine.complete(request))
    await asyncio.to_thread(gate.allow, 6)
    assert [spec.name for spec in engine.layout.parameters] == [name for name, _ in new.named_parameters()]
    engine.staging()[:] = as_bytes(new)
    await asyncio.to_thread(engine.finish_staging)
    commit = asyncio.create_task(engine.commit(version=3, epoch=1, on_update=on_update))
    await asyncio.sleep(0)
    gate.open()
    assert await commit < SOON_S
    answer = await task
    assert gate.log[0] == "prefill 3 tokens to rows [0, 1, 2, 3]", "a group shares its prompt"
    assert (answer.epoch, answer.model_version, engine.serving()) == (0, 3, (1, 3))
    for choice in answer.choices:
        (first, before), (second, after) = choice.version_spans or []
        assert (first, second, before + after) == (0, 3, 20)
        assert 6 <= before <= 7 + early
        by_old, by_new = _rescored(old, choice), _rescored(new, choice)
        assert choice.token_logprobs is not None
        assert choice.token_logprobs[:before] == pytest.approx(by_old[:before], abs=tolerance)
        if on_update is OnUpdate.RECOMPUTE_KV:
            assert choice.token_logprobs[before:] == pytest.approx(by_new[before:], abs=tolerance)
        else:  # the cache of the old model is still read, so log-probs differ from the new model's
            assert choice.token_logprobs[before:] != pytest.approx(by_new[before:], abs=100 * tolerance)


def _rescored(model, choice):
    """Return the log-probs of the tokens of `choice`, computed by `model` alone in one forward pass."""
    tokens = choice.token_ids or []
    with torch.no_grad():
        logp = model(torch.tensor([PROMPT + tokens])).logits[0].log_softmax(-1)
    return logp[len(PROMPT) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def untied(source, target):
    """Write the model in `source` to `target`, with an output layer that does not share the embedding."""
    model = AutoModelForCausalLM.from_pretrained(source)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(target)


async def spoil(engine, path, as_bytes):
    """Update an engine of the `untied` model to weights with a NaN embedding for `SPOILED`.

    With these weights, exactly the positions that attend to that token become NaN. They are sent as an update, because
    the engine would not load a model directory with NaN.
    """
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.get_input_embeddings().weight[SPOILED] = torch.nan
    engine.staging()[:] = as_bytes(model)
    await asyncio.to_thread(engine.finish_staging)
    await engine.commit(version=1, epoch=0, on_update=OnUpdate.CONTINUE)


async def refuses_alone(engine):
    """Assert that prompts with `SPOILED` are rejected, and other prompts unaffected, also later in the same slot."""

    def ask(*prompt):
        return ChatCompletionRequest(prompt_token_ids=[*prompt], max_tokens=8, seed=1, return_token_ids=True)

    healthy, spoiled = [ask(9, 10), ask(11, 12)], ask(9, SPOILED, 10, 11, 12, 13, 14)
    async with asyncio.timeout(PATIENCE_S):
        expected = [(await engine.complete(each)).choices for each in healthy]
        for _ in range(2):
            requests = [spoiled, *healthy, *healthy]
            refusal, *answers = await asyncio.gather(*map(engine.complete, requests), return_exceptions=True)
            assert isinstance(refusal, NotFinite) and "after a prompt of 7 tokens" in str(refusal), refusal
            choices = [answer.choices if isinstance(answer, ChatCompletion) else answer for answer in answers]
            for before, after in zip(expected * 2, choices, strict=True):
                assert not isinstance(after, BaseException), after
                assert [choice.token_ids for choice in after] == [choice.token_ids for choice in before]
    assert engine.health().state is EngineState.READY
