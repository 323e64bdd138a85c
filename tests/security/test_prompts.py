"""A long text from one client cannot delay an engine's other clients: an engine checks its length before tokenising."""

from __future__ import annotations

import asyncio
import threading
from typing import Final

import pytest

from inference_contract.errors import InvalidRequest
from inference_contract.schemas import ChatCompletionRequest, ChatMessage
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from tests.fakes.engine_options import engine_options
from tests.fakes.version_engine import PROMPT, VersionRunner
from tests.patience import PATIENCE_S

CONTEXT: Final = VersionRunner.context_length


class SlowTokenizer:
    """A tokenizer that counts its texts and finishes a text only when the test says so, as if the text were huge."""

    def __init__(self):
        self.texts = 0
        self.may_end = threading.Event()
        self.eos_token_ids = frozenset()

    def encode_request(self, chat):
        self.texts += 1
        assert self.may_end.wait(PATIENCE_S)
        return PROMPT

    def decode(self, token_ids):
        return ""

    def detokenizer(self):
        return self

    def push(self, token_id):
        return ""

    def flush(self):
        return ""


@pytest.fixture
async def served():
    tokenizer = SlowTokenizer()
    engine = BatchingEngine(engine_options(), load=VersionRunner, tokenizer=tokenizer)
    await engine.start()
    yield engine, tokenizer
    tokenizer.may_end.set()
    await engine.close()


def request_for(*contents):
    return ChatCompletionRequest(messages=[ChatMessage(role="user", content=each) for each in contents], max_tokens=1)


@pytest.mark.parametrize("contents", [("a" * 4_000_000,), ("a" * 20_000,) * 2, ("a",) * 100_000])
async def test_text_that_cannot_fit_the_context_is_rejected_before_it_is_tokenised(served, contents):
    engine, tokenizer = served
    request = request_for(*contents)
    with pytest.raises(InvalidRequest, match=f"the context of {CONTEXT} tokens"):
        await engine.complete(request)
    with pytest.raises(InvalidRequest):
        async for _ in engine.stream(request):
            pass
    assert tokenizer.texts == 0


async def test_other_requests_complete_while_a_long_text_is_tokenised(served):
    engine, tokenizer = served
    long = asyncio.create_task(engine.complete(request_for("a" * 10_000)))
    while not tokenizer.texts:
        await asyncio.sleep(0.01)
    other = await engine.complete(ChatCompletionRequest(prompt_token_ids=PROMPT, max_tokens=1))
    assert other.choices and not long.done()
    tokenizer.may_end.set()
    assert (await long).choices


async def test_engine_can_close_while_a_text_is_tokenised(served):
    engine, tokenizer = served
    asking = [asyncio.create_task(engine.complete(request_for("a"))) for _ in range(3)]
    while not tokenizer.texts:
        await asyncio.sleep(0.01)
    await engine.close()
    for each in asking:
        each.cancel()
    ended = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(each, BaseException) for each in ended)
