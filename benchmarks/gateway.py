"""Measure the cost of an actor's gateway: processor time of a turn, and memory of open episodes.

    turn      an agent in another process repeats a conversation of `CONTEXT` tokens in `MESSAGES` messages; the result
              is the processor time of the gateway's process per request
    memory    `OPEN` episodes of `CONTEXT` tokens each, all waiting for an answer on a connection of their own

No engine takes part: a fake sampler answers immediately.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any, Final, final

import psutil

from benchmarks.measure import Row, bootstrap_median, report
from benchmarks.processes import Child, open_many_files, spawned
from inference_contract.schemas import (
    AssistantMessage,
    ChatCompletion,
    ChatCompletionRequest,
    Choice,
    FinishReason,
    Usage,
)
from inference_contract.tools import ToolCall
from pipelinerl.environments.environment import EpisodeLimits
from pipelinerl.environments.episode import Episode
from pipelinerl.environments.gateway import Gateway, OpenEpisode
from pipelinerl.system.http_client import call_timeout, hot_session
from pipelinerl.types import Message, Problem, PromptOrder, Purpose, Sampling

CONTEXT: Final = 2048
MESSAGES: Final = 16
NEW_TOKENS: Final = 64
REQUESTS: Final = 200
ROUNDS: Final = 7
OPEN: Final = 2000
_WORDS: Final = "the quick brown fox jumps over a lazy dog and then goes home "
_DEADLINE_S: Final = 300.0
#: Seconds between the connections of two agents. Simultaneous connections would overflow the listener's queue.
_APART_S: Final = 0.02


def run(quick: bool = False) -> None:
    """Run the benchmark, print its table and, unless `quick`, write its record."""
    open_many_files()
    with spawned(_agents) as agents:
        turns = asyncio.run(_cost(agents, 2 if quick else ROUNDS))
        mib = asyncio.run(_memory(agents))
    gateway = bootstrap_median(turns)
    rows = [
        Row(f"processor time of a turn at {CONTEXT} tokens, ms", gateway, "<= 0.5", gateway.median <= 0.5),
        Row(f"{OPEN} open episodes, MiB", mib, "<= 400", mib <= 400),
    ]
    report("gateway", rows, {"turn_ms": gateway.as_dict(), "open_mib": mib}, quick=quick)


def conversation() -> list[dict[str, str]]:
    """Return a conversation of about `CONTEXT` tokens, four characters each, that ends with a user's message."""
    length = CONTEXT * 4 // MESSAGES
    text = (_WORDS * (length // len(_WORDS) + 1))[:length]
    roles = ["user", "assistant"] * (MESSAGES // 2)
    return [{"role": role, "content": f"{place} {text}"} for place, role in enumerate([*roles, "user"])]


def completion(
    prompt: Sequence[int], text: str, sampled: Sequence[int] = range(NEW_TOKENS), calls: Sequence[ToolCall] = ()
) -> ChatCompletion:
    """Return a `ChatCompletion` with the given tokens, as an engine would return it."""
    number = len(sampled)
    choice = Choice(
        index=0,
        message=AssistantMessage(content=text, tool_calls=list(calls) or None),
        finish_reason=FinishReason.TOOL_CALLS if calls else FinishReason.STOP,
        token_ids=list(sampled),
        token_logprobs=[-0.5123456] * number,
        version_spans=[(1, number)],
    )
    usage = Usage(prompt_tokens=len(prompt), completion_tokens=number, total_tokens=len(prompt) + number)
    return ChatCompletion(
        id="c", created=0, model="m", choices=[choice], usage=usage, prompt_token_ids=list(prompt), model_version=1
    )


@final
class _Sampler:
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = 0

    async def __call__(self, request: ChatCompletionRequest) -> ChatCompletion:
        self.waiting += 1
        await self.gate.wait()
        self.waiting -= 1
        known = request.continue_token_ids or []
        new = CONTEXT // MESSAGES - NEW_TOKENS // 2
        return completion([*known, *range(new)], "an answer")


def order(number: int, max_tokens: int = NEW_TOKENS + 1, *, num_samples: int = 1) -> PromptOrder:
    """Return order number `number` for a prompt: it requests `num_samples` episodes of at most `max_tokens` tokens."""
    problem = Problem(problem_id="p", domain="d", messages=(Message("user", "1"),), ground_truth="")
    sampling = Sampling(num_samples=num_samples, max_tokens=max_tokens)
    return PromptOrder(
        order_id=f"o{number}", index=number, purpose=Purpose.TRAINING, problem=problem, sampling=sampling, seed=number
    )


@asynccontextmanager
async def _opened(gateway: Gateway, sample: _Sampler, number: int) -> AsyncIterator[OpenEpisode]:
    episode, messages = Episode(order(number), 0, EpisodeLimits(max_turns=10_000)), conversation()
    for end in range(1, MESSAGES, 2):
        planned = episode.plan("main", {"messages": messages[:end]})
        known = planned.request.continue_token_ids or []
        prompt = [*known, *range(2 * CONTEXT // MESSAGES - NEW_TOKENS)]
        episode.record(planned, completion(prompt, messages[end]["content"]))
    async with gateway.open(episode, sample) as opened:
        yield opened


async def _cost(agents: Child, rounds: int) -> list[float]:
    """Return the gateway's processor milliseconds per request, one number for each round."""
    gateway, sample, took = Gateway(), _Sampler(), list[float]()
    async with gateway.serve(), _opened(gateway, sample, 0) as opened:
        for _ in range(rounds):
            began = time.process_time()
            await asyncio.to_thread(agents.call, ([f"{opened.base_url()}/chat/completions"] * REQUESTS, 1, 0.0))
            took.append((time.process_time() - began) / REQUESTS * 1000)
    return took


async def _memory(agents: Child) -> float:
    gateway, sample, process = Gateway(), _Sampler(), psutil.Process()
    sample.gate.clear()
    async with asyncio.timeout(_DEADLINE_S), AsyncExitStack() as stack:
        await stack.enter_async_context(gateway.serve())
        before = process.memory_info().rss
        opened = [await stack.enter_async_context(_opened(gateway, sample, number)) for number in range(OPEN)]
        urls = [f"{each.base_url()}/chat/completions" for each in opened]
        sending = asyncio.create_task(asyncio.to_thread(agents.call, (urls, OPEN, _APART_S), timeout_s=_DEADLINE_S))
        while sample.waiting < OPEN:
            await asyncio.sleep(0.1)
        taken = process.memory_info().rss - before
        sample.gate.set()
        await sending
    return taken / 2**20


def _agents(pipe: Connection) -> None:
    """Run the agents, which send requests on demand; they have a process of their own, whose time is not measured."""
    open_many_files()
    pipe.send("ready")
    while True:
        urls, at_once, apart_s = pipe.recv()
        asyncio.run(_ask(urls, at_once=at_once, apart_s=apart_s))
        pipe.send("done")


async def _ask(urls: Sequence[str], *, at_once: int, apart_s: float) -> None:
    body = json.dumps({"model": "m", "messages": conversation()}).encode()
    places, headers = asyncio.Semaphore(at_once), {"content-type": "application/json"}
    async with hot_session(token=None, keep_alive_s=15.0) as session:

        async def one(url: str) -> Mapping[str, Any]:
            async with (
                places,
                session.post(url, data=body, headers=headers, timeout=call_timeout(_DEADLINE_S)) as response,
            ):
                assert response.status == 200, await response.text()
                answer: Mapping[str, Any] = await response.json()
                return answer

        async with asyncio.TaskGroup() as group:
            for url in urls:
                group.create_task(one(url))
                await asyncio.sleep(apart_s)
