"""The gateway, to which agents send their chat requests instead of to engines, called with OpenAI's own client."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import openai
import pytest

from inference_contract.errors import ContextExceeded
from pipelinerl.config.domains import EpisodeSection
from pipelinerl.errors import DeadlineError
from pipelinerl.plugins.episodes.episode import Episode
from pipelinerl.plugins.episodes.gateway import Gateway
from tests.fakes.talking_sampler import TalkingSampler, order
from tests.patience import PATIENCE_S

HELLO = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def opened(sampler, **limits):
    async def sample(request, on_text=None):
        return (await sampler.complete(request, on_text=on_text)).completion

    gateway = Gateway()
    one = Episode(order(), 0, EpisodeSection(**limits))
    async with asyncio.timeout(PATIENCE_S), gateway.serve(), gateway.open(one, sample) as episode:
        yield episode


async def reply(url, messages=HELLO, *, key="any", **options):
    """Send `messages` to the gateway at `url` with OpenAI's client; return the assistant message of the response."""
    async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
        answer = await client.chat.completions.create(model="any", messages=messages, **options)
        return answer.choices[0].message


async def test_gateway_assigns_a_request_to_its_episode_by_the_url_path_or_by_the_api_key():
    async with opened(TalkingSampler(lambda messages: f"a{len(messages)}")) as episode:
        first = await reply(episode.base_url(), temperature=0.3)
        base = episode.base_url().split("/e/")[0] + "/v1"
        again = [*HELLO, first.model_dump(exclude_none=True), {"role": "user", "content": "more"}]
        second = await reply(base, again, key=episode.episode.secret)
        assert (first.content, second.content) == ("a1", "a3")
        assert [turn.parent for turn in episode.episode.turns] == [None, episode.episode.turns[0]]


async def test_request_to_the_gateway_after_its_episode_has_ended_gets_status_404():
    async with opened(TalkingSampler()) as episode:
        ended = episode.base_url().replace(episode.episode.secret, "0" * 32)
        with pytest.raises(openai.NotFoundError, match="has ended"):
            await reply(ended)


@pytest.mark.parametrize(
    ("error", "status"),
    [(ContextExceeded("too long"), 400), (DeadlineError("no engine"), 424)],
    ids=["context", "none"],
)
async def test_gateway_reports_errors_with_http_statuses_that_clients_do_not_retry(error, status):
    def fail(_):
        raise error

    sampler = TalkingSampler(fail)
    async with opened(sampler) as episode:
        with pytest.raises(openai.APIStatusError) as refused:
            await reply(episode.base_url())
        assert refused.value.status_code == status and len(sampler.requests) == 1
        assert (episode.failure is error) == (status == 424)


async def test_turn_of_a_client_that_disconnects_is_cancelled_and_not_recorded():
    sampler = TalkingSampler()
    sampler.gate.clear()
    async with opened(sampler) as episode:
        asking = asyncio.create_task(reply(episode.base_url()))
        while not sampler.requests:
            await asyncio.sleep(0.005)
        asking.cancel()
        while not sampler.cancelled:
            await asyncio.sleep(0.005)
        assert not episode.episode.turns
        sampler.gate.set()
        await reply(episode.base_url())
        assert len(episode.episode.turns) == 1 and episode.episode.turns[0].number == 0
