"""A real checkpoint in which one token has no finite embedding, and what engines must make of prompts with it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import torch
from transformers import AutoModelForCausalLM

from inference_contract.errors import NotFinite
from inference_contract.schemas import ChatCompletion, ChatCompletionRequest, EngineState
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from tests.patience import PATIENCE_S

#: The token.
SPOILED: Final = 8


def with_spoiled_token(source: Path, target: Path) -> None:
    """Write the model in `source` to `target`; whatever attends to `SPOILED` is NaN, and nothing else."""
    model = AutoModelForCausalLM.from_pretrained(source)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        model.get_input_embeddings().weight[SPOILED] = torch.nan
    model.save_pretrained(target)


async def refuses_alone(engine: BatchingEngine) -> None:
    """A prompt with `SPOILED` is refused; others are sampled beside it and after it, in its row, as before it."""

    def ask(*prompt: int) -> ChatCompletionRequest:
        return ChatCompletionRequest(prompt_token_ids=[*prompt], max_tokens=8, seed=1, return_token_ids=True)

    healthy, spoiled = [ask(9, 10), ask(11, 12)], ask(9, SPOILED, 10, 11, 12, 13, 14)
    async with asyncio.timeout(PATIENCE_S):
        expected = [(await engine.complete(each)).choices for each in healthy]
        for _ in range(2):
            asked = [spoiled, *healthy, *healthy]
            refusal, *answers = await asyncio.gather(*map(engine.complete, asked), return_exceptions=True)
            assert isinstance(refusal, NotFinite) and "after a prompt of 7 tokens" in str(refusal), refusal
            choices = [answer.choices if isinstance(answer, ChatCompletion) else answer for answer in answers]
            for before, after in zip(expected * 2, choices, strict=True):
                assert not isinstance(after, BaseException), after
                assert [choice.token_ids for choice in after] == [choice.token_ids for choice in before]
    assert engine.health().state is EngineState.READY
