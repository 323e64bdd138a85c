"""A real checkpoint in which one token has a NaN embedding, and how engines must treat prompts with it."""

import asyncio
from dataclasses import replace
from typing import Final

import torch
from transformers import AutoModelForCausalLM

from inference_contract.errors import NotFinite
from inference_contract.schemas import ChatCompletion, ChatCompletionRequest, EngineState
from inference_contract.weights import OnUpdate
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from tests.fakes.torch_rows import bytes_of
from tests.patience import PATIENCE_S

#: Id of the token whose embedding is NaN.
SPOILED: Final = 8


async def refuses_alone(options, folder, load, tokenizer):
    """Assert that an engine rejects prompts with `SPOILED`, and serves others, also later in the same slot.

    Exactly the positions that attend to that token become NaN. The weights with the NaN embedding, in a model without
    tied embeddings, arrive as an update, because the engine would not load a model directory with NaN.
    """
    model = AutoModelForCausalLM.from_pretrained(options.model_path)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(folder)
    options = replace(options, model_path=folder)
    engine = BatchingEngine(options, load=lambda: load(options), tokenizer=tokenizer)
    await engine.start()
    with torch.no_grad():
        model.get_input_embeddings().weight[SPOILED] = torch.nan
    engine.staging()[:] = bytes_of(model)
    await asyncio.to_thread(engine.finish_staging)
    await engine.commit(version=1, epoch=0, on_update=OnUpdate.CONTINUE)

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
    await engine.close()
