"""Handover of an answer to another engine, which samples only the tokens that have not arrived."""

import asyncio
from collections import Counter
from contextlib import aclosing
from typing import final

import pytest

from inference_contract.errors import Dirty, EngineStopped, InvalidRequest
from inference_contract.schemas import ChatCompletion, ChatCompletionRequest, Continuation, EngineState, Health
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.engines.http.pool import EnginePool
from pipelinerl.engines.http.server import create_app
from pipelinerl.errors import EngineUnreachable
from tests.engines.http.test_partial_answer import chunk, part
from tests.fakes.scripted_engine import ScriptedEngine, application
from tests.fakes.served import as_process, in_thread
from tests.patience import PATIENCE_S, SOON_S

LENGTH = 6
#: What the last chunk of a sample says.
LAST = {"end": "length", "text": "whole"}


def ask(**fields):
    given = {"prompt_token_ids": [1, 2, 3], "seed": 4, "n": 2, "max_tokens": LENGTH, "return_token_ids": True}
    return ChatCompletionRequest(**given | fields)


@final
class Followed:
    """An engine client over HTTP that counts, for each request (by seed), the chunks with tokens that were read."""

    def __init__(self, client):
        self._client = client
        self.came = Counter()

    async def health(self, url):
        return await self._client.health(url)

    async def chat(self, url, request):
        return await self._client.chat(url, request)

    async def stream(self, url, request):
        async with aclosing(self._client.stream(url, request)) as chunks:
            async for chunk in chunks:
                yield chunk
                # A chunk is counted when the reader asks for the next chunk.
                self.came[request.seed] += any(part.token_ids for part in chunk.choices)


@final
class Scripted:
    """An engine client whose engines stream some tokens and then end as scripted; token t of sample i is 10·i + t."""

    def __init__(self, **engines):
        """Script each engine as (epoch, version, tokens sent per sample, exception raised after the tokens or None)."""
        self.engines = engines
        self.offers = dict.fromkeys(engines, Continuation.SAME_NOISE)
        self.requests = []
        self.short = {}

    async def health(self, url):
        return Health(state=EngineState.READY, model_version=0, epoch=0, continuation=self.offers[url])

    async def chat(self, url, request):
        assert request.prefixes is None and not request.stream
        self.requests.append((url, None))
        epoch, _, _, error = self.engines[url]
        if error is not None:
            raise error
        return ChatCompletion(
            id="c", created=0, model="m", choices=[], model_version=0, epoch=epoch,
            usage={"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3},
        )  # fmt: skip

    async def stream(self, url, request):
        given = dict.fromkeys(range(request.n), 0)
        if request.prefixes is not None:
            given = {prefix.index: len(prefix.token_ids) for prefix in request.prefixes}
        self.requests.append((url, list(given.values()) if request.prefixes is not None else None))
        epoch, version, count, error = self.engines[url]
        for come in range(1, LENGTH + 2):
            if error is not None and come > count:
                raise error
            parts = []
            for i, begun in given.items():
                at, length = begun + come - 1, self.short.get(i, LENGTH)
                if at < length:
                    parts.append(part(i, [10 * i + at], version, **(LAST if at + 1 == length else {})))
            yield chunk(*parts, version=version, epoch=epoch, prompt=[1, 2, 3] if come == 1 else None)
            await asyncio.sleep(0)


def is_whole(answer):
    for choice in answer.completion.choices:
        assert choice.token_ids == [10 * choice.index + t for t in range(LENGTH)]
        assert (choice.finish_reason, choice.message.content) == ("length", "whole")


@pytest.mark.parametrize("error", [EngineUnreachable("dead"), Dirty("half"), EngineStopped("closing")])
async def test_answer_continues_on_another_engine_after_the_first_fails(error):
    client, begun = Scripted(a=(1, 7, 4, error), b=(1, 6, 0, None)), []
    answer = await EnginePool(client, ["a", "b"], min_epoch=1).complete(ask(), begun=lambda: begun.append(len(begun)))
    is_whole(answer)
    assert client.requests == [("a", None), ("b", [4, 4])]
    assert [choice.version_spans for choice in answer.completion.choices] == [[(7, 4), (6, 2)]] * 2
    assert (answer.url, answer.tokens_kept, answer.tokens_resampled) == ("b", 8, 0)
    assert begun == [0], "its oldest token is as old as it was"


async def test_samples_that_are_complete_are_not_requested_again_after_a_handover():
    """Sample 1 is already complete when the first engine dies."""
    client = Scripted(a=(1, 7, 4, EngineUnreachable("dead")), b=(1, 7, 0, None))
    client.short = {1: 3}
    answer = await EnginePool(client, ["a", "b"]).complete(ask(n=3))
    assert [choice.token_ids for choice in answer.completion.choices] == [
        [0, 1, 2, 3, 4, 5],
        [10, 11, 12],
        [20, 21, 22, 23, 24, 25],
    ]
    assert client.requests == [("a", None), ("b", [4, 4])] and answer.tokens_kept == 11


async def test_answer_whose_samples_are_all_complete_survives_a_broken_stream():
    client = Scripted(a=(1, 7, LENGTH, EngineUnreachable("dead")), b=(1, 7, 0, None))
    answer = await EnginePool(client, ["a", "b"]).complete(ask())
    is_whole(answer)
    assert client.requests == [("a", None)] and answer.url == "a"


async def test_engine_that_cannot_continue_answers_gets_the_whole_request():
    client, begun = Scripted(a=(1, 7, 4, EngineUnreachable("dead")), b=(1, 7, 0, None)), []
    client.offers["b"] = Continuation.NONE
    answer = await EnginePool(client, ["a", "b"]).complete(ask(), begun=lambda: begun.append(0))
    assert client.requests == [("a", None), ("b", None)] and len(begun) == 2
    assert (answer.tokens_kept, answer.tokens_resampled) == (0, 8)


async def test_answer_starts_over_on_an_engine_with_weights_of_another_trainer_epoch():
    """Weights of different epochs may have diverged, so their tokens are not joined."""
    client, begun = Scripted(a=(1, 7, 4, EngineUnreachable("dead")), b=(2, 6, 0, None)), []
    answer = await EnginePool(client, ["a", "b"]).complete(ask(), begun=lambda: begun.append(0))
    is_whole(answer)
    assert client.requests == [("a", None), ("b", [4, 4]), ("b", None)] and len(begun) == 2
    assert [choice.version_spans for choice in answer.completion.choices] == [[(6, LENGTH)]] * 2
    assert (answer.tokens_kept, answer.tokens_resampled, answer.completion.epoch) == (0, 8, 2)


async def test_engine_that_restarted_with_old_weights_does_not_continue_an_answer():
    client = Scripted(a=(1, 7, 4, EngineUnreachable("dead")), b=(0, 0, 0, None), c=(1, 7, 0, None))
    answer = await EnginePool(client, ["a", "b", "c"], min_epoch=1).complete(ask())
    is_whole(answer)
    assert client.requests == [("a", None), ("b", [4, 4]), ("c", [4, 4])] and answer.tokens_kept == 8


async def test_answer_starts_over_on_an_engine_that_rejects_its_continuation():
    client = Scripted(a=(1, 7, 4, EngineUnreachable("dead")), b=(1, 7, 0, InvalidRequest("no prefixes here")))
    pool = EnginePool(client, ["a", "b"], suspect_s=60.0)
    with pytest.raises(InvalidRequest, match="b: no prefixes here"):
        await asyncio.wait_for(_until_only(pool, client), SOON_S)
    assert client.requests == [("a", None), ("b", [4, 4]), ("b", None)]


async def _until_only(pool, client):
    """Complete a request; once engine `a` has received it, let `a` drain, so that `b` is the only serving engine."""
    running = asyncio.create_task(pool.complete(ask()))
    while not client.requests:
        await asyncio.sleep(0)
    pool.update(["b"], finishing=["a"])
    return await running


async def test_engine_pool_without_a_streaming_interval_sends_unstreamed_requests():
    client = Scripted(a=(1, 7, 0, None))
    await EnginePool(client, ["a"], interval_s=0.0).complete(ask())
    assert client.requests == [("a", None)]


# --- real engines -------------------------------------------------------------------------------------------------

#: Seconds per decode step of the failing engine. An answer would take half a minute, so it is cut off midway.
SLOW_S = "0.2"


async def _kept_when(ends, dies, process, stays):
    """Return answers that `ends` moves from engine `dies` to `stays`, and answers that `stays` alone gives."""
    requests = [ask(n=4, max_tokens=150, seed=seed) for seed in range(6)]
    async with EngineClient() as client, asyncio.timeout(PATIENCE_S):
        expected = [await client.chat(stays, request) for request in requests]
        followed = Followed(client)
        pool = EnginePool(followed, [dies], interval_s=0.02)
        running = [asyncio.create_task(pool.complete(request)) for request in requests]
        while len(followed.came) < len(requests):
            await asyncio.sleep(0.005)
        ends(pool, process)
        pool.update([stays], finishing=[dies])
        return await asyncio.gather(*running), expected


async def test_answers_of_a_killed_engine_are_completed_by_another_engine_with_the_same_tokens():
    with (
        in_thread(application()) as stays,
        as_process("tests.fakes.scripted_engine", "none", SLOW_S) as (dies, process),
    ):
        answers, expected = await _kept_when(lambda _, dying: dying.kill(), dies, process, stays)
    assert [answer.completion.choices for answer in answers] == [whole.choices for whole in expected]
    assert all(answer.tokens_kept > 0 and answer.tokens_resampled == 0 for answer in answers)


async def test_handing_over_an_answer_frees_the_slots_of_the_first_engine():
    slow = ScriptedEngine(step_s=float(SLOW_S))
    with in_thread(create_app(slow, token=None)) as leaves, in_thread(application()) as stays:
        answers, expected = await _kept_when(lambda pool, _: pool.update([stays]), leaves, None, stays)
        async with asyncio.timeout(PATIENCE_S):
            while slow._running:
                await asyncio.sleep(0.01)
    assert [answer.completion.choices for answer in answers] == [whole.choices for whole in expected]
    assert all(answer.tokens_kept > 0 for answer in answers)
