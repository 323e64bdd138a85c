"""Continuation of answers that another engine began, and streaming of running answers at intervals."""

import asyncio
from contextlib import aclosing

import pytest

from inference_contract.errors import EngineStopped, InvalidRequest
from inference_contract.schemas import AnswerPrefix, ChatCompletionRequest, EngineState, FinishReason, StreamOptions
from inference_contract.weights import OnUpdate
from tests.fakes.gated_runner import DEADLINE_S


def ask(n, *, max_tokens=20, **others):
    fields = {"prompt_token_ids": [7, 8, 9], "n": n, "max_tokens": max_tokens, "seed": 3, "return_token_ids": True}
    return ChatCompletionRequest.model_validate(fields | others)


def cut(choices, ends):
    """Return answer prefixes: for each choice index i in `ends`, the first `ends[i]` tokens of choice i."""
    return [AnswerPrefix(index=i, token_ids=(choices[i].token_ids or [])[:end]) for i, end in ends.items()]


def rare(n, interval_s, **others):
    return ask(n, stream=True, stream_options=StreamOptions(interval_s=interval_s), **others)


@pytest.mark.parametrize("ends", [{0: 1, 1: 0, 4: 19}, {2: 7}, {0: 5, 1: 5, 2: 5, 3: 5, 4: 5}])
async def test_answer_continued_from_prefixes_equals_the_uninterrupted_answer(engine, gate, ends):
    """One case has five samples, more than the four rows of the engine."""
    gate.open()
    whole = (await engine.complete(ask(5))).choices
    answer = await engine.complete(ask(len(ends), prefixes=cut(whole, ends)))
    assert [choice.index for choice in answer.choices] == list(ends)
    for choice, end in zip(answer.choices, ends.values(), strict=True):
        undisturbed = whole[choice.index]
        assert choice.token_ids == undisturbed.token_ids[end:]
        assert choice.token_logprobs == undisturbed.token_logprobs[end:]
        assert choice.version_spans == [(0, 20 - end)]
        assert (choice.message, choice.finish_reason) == (undisturbed.message, FinishReason.LENGTH)


async def test_samples_with_different_prefixes_are_prefilled_separately(engine, gate):
    gate.open()
    whole = (await engine.complete(ask(5))).choices
    gate.log.clear()
    await engine.complete(ask(5, prefixes=cut(whole, {0: 1, 1: 0, 2: 3, 3: 4, 4: 2})))
    prefilled = [line for line in gate.log if "tokens" in line]
    assert prefilled == [
        "prefill 3 tokens to rows [0]",
        "prefill 2 tokens to rows [1]",
        "prefill 5 tokens to rows [2]",
        "prefill 6 tokens to rows [3]",
        "prefill 4 tokens to rows [3]",
    ]


async def test_update_in_recompute_kv_mode_prefills_the_given_prefix_and_the_new_tokens(engine, gate):
    prefix = AnswerPrefix(index=0, token_ids=[5, 6])
    running = asyncio.create_task(engine.complete(ask(1, prefixes=[prefix])))
    await asyncio.to_thread(gate.allow, 2)
    swap = asyncio.create_task(engine.commit(version=1, epoch=0, on_update=OnUpdate.RECOMPUTE_KV))
    await asyncio.sleep(0)
    gate.open()
    await swap
    (choice,) = (await running).choices
    recomputed = 3 + 2 + (choice.version_spans or [])[0][1] - 1
    assert f"prefill {recomputed} tokens to rows [0]" in gate.log


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": 2}, "has 2 tokens of at most 2"),
        ({"stop": ["i"]}, "has a stop string"),
        ({"prefixes": [AnswerPrefix(index=0, token_ids=[5, 9999])]}, "has a token outside"),
    ],
)
async def test_answer_prefixes_that_no_engine_could_have_sampled_are_rejected(engine, gate, endless, fields, says):
    prefixes = [AnswerPrefix(index=0, token_ids=endless.encode("hi"))]
    with pytest.raises(InvalidRequest, match=says):
        await engine.complete(ask(1, **{"prefixes": prefixes} | fields))


async def test_stream_with_an_interval_between_chunks_holds_back_only_the_newest_token(engine, gate):
    async with aclosing(engine.stream(rare(2, 0.02))) as stream, asyncio.timeout(DEADLINE_S):
        coming = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(gate.allow, 4)
        chunk = await coming
        counts = [len(part.token_ids or ()) for part in chunk.choices]
        while min(counts) < 3:
            chunk = await anext(stream)
            counts = [a + len(part.token_ids or ()) for a, part in zip(counts, chunk.choices, strict=True)]
        assert counts == [3, 3], "the fourth may be the last"
        gate.open()
        rest = [part async for later in stream for part in later.choices]
    assert sum(len(part.token_ids or ()) for part in rest) == 2 * 17
    whole = await engine.complete(ask(2))
    assert [part.delta.content for part in rest if part.finish_reason] == [c.message.content for c in whole.choices]


async def test_closing_engine_streams_all_sampled_tokens_before_the_error(engine, gate):
    """No sampled token is lost, even if the streaming interval is far longer than the time until the close."""
    came = []

    async def follow():
        async for chunk in engine.stream(rare(2, 3600.0)):
            came.extend(len(part.token_ids or ()) for part in chunk.choices)

    following = asyncio.create_task(follow())
    await asyncio.to_thread(gate.allow, 5)
    closing = asyncio.create_task(engine.close())
    async with asyncio.timeout(DEADLINE_S):
        # Wait before the gate opens, or the engine would finish the answer.
        while engine.health().state is not EngineState.STOPPED:
            await asyncio.sleep(0.001)
    gate.open()
    with pytest.raises(EngineStopped):
        await following
    await closing
    assert len(came) == 2 and min(came) >= 5
