"""Measure an actor's gateway: processor time of a turn, memory of open episodes, time of real turns.

    turn      an agent in another process repeats a conversation of `CONTEXT` tokens in `MESSAGES` messages; the result
              is the processor time of the gateway's process per request
    memory    `OPEN` episodes of `CONTEXT` tokens each, all waiting for an answer on a connection of their own; the
              result is the memory that they add to the gateway's process
    ratio     agents of `EPISODES` concurrent episodes send turns of `NEW_TOKENS` new tokens through a gateway, which
              forwards them to a torch engine as an actor does; in the other arm they send the engine the requests that
              the gateway would send. Engine, gateway and agents have a process each

In `turn` and `memory`, a fake sampler answers immediately instead of an engine. `--only PART` keeps the recorded
results of all other parts.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import psutil

from benchmarks.measure import Paired, Row, bootstrap_median, paired, recorded_parts, report, seconds_of
from benchmarks.processes import Child, open_many_files, spawned
from benchmarks.served_engine import EngineOrder, served
from inference_contract.schemas import (
    AssistantMessage,
    ChatCompletion,
    ChatCompletionRequest,
    Choice,
    FinishReason,
    Usage,
)
from inference_contract.tools import ToolCall
from pipelinerl.config.domains import EpisodeSection
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.engines.http.pool import EnginePool
from pipelinerl.plugins.episodes.episode import Episode
from pipelinerl.plugins.episodes.gateway import Gateway, OnText, OpenEpisode, SampleTurn
from pipelinerl.plugins.warmstart.tiny_decoder import DebugSize, random_decoder
from pipelinerl.system.http_client import call_timeout, hot_session
from pipelinerl.types import Message, Problem, PromptOrder, Purpose, Sampling

CONTEXT: Final = 2048
MESSAGES: Final = 16
NEW_TOKENS: Final = 64
REQUESTS: Final = 200
ROUNDS: Final = 7
OPEN: Final = 2000
EPISODES: Final = 8
TURNS: Final = 4
_PARTS: Final = ("turn", "memory", "ratio")
_WORDS: Final = "the quick brown fox jumps over a lazy dog and then goes home "
_DEADLINE_S: Final = 300.0
#: Seconds between the connections of two agents. Simultaneous connections would overflow the listener's queue.
_APART_S: Final = 0.02


def run(quick: bool = False, *, only: Sequence[str] = _PARTS) -> None:
    """Run the benchmark or its parts `only`, print the table and, unless `quick`, write the record."""
    open_many_files()
    rows, payload = list[Row](), recorded_parts("gateway", _PARTS)
    with spawned(_agents) as agents:
        if "turn" in only:
            turn = bootstrap_median(asyncio.run(_cost(agents, 2 if quick else ROUNDS)))
            name = f"processor time of a turn at {CONTEXT} tokens, ms"
            rows.append(Row(name, turn, "<= 0.5", turn.median <= 0.5))
            payload["turn"] = {"ms": turn.as_dict()}
        if "memory" in only:
            mib = asyncio.run(_memory(agents))
            rows.append(Row(f"{OPEN} open episodes, MiB", mib, "<= 400", mib <= 400))
            payload["memory"] = {"mib": mib}
        if "ratio" in only:
            timings = _real_turns(agents, 2 if quick else 3 * ROUNDS)
            ratio = timings.ratio("gateway", "direct")
            tokens_per_s = EPISODES * TURNS * NEW_TOKENS / timings.median("gateway")
            name = f"time of turns of {NEW_TOKENS} tokens in {EPISODES} episodes, gateway / direct"
            rows += [Row(name, ratio, "<= 1.03", ratio.high <= 1.03), Row("    tokens/s of the gateway", tokens_per_s)]
            payload["ratio"] = {"ratio": ratio.as_dict(), **timings.as_dict()}
    report("gateway", rows, payload, quick=quick)


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


class _Sampler:
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = 0

    async def __call__(self, request: ChatCompletionRequest, on_text: OnText | None = None) -> ChatCompletion:
        self.waiting += 1
        await self.gate.wait()
        self.waiting -= 1
        known = request.continue_token_ids or []
        new = CONTEXT // MESSAGES - NEW_TOKENS // 2
        return completion([*known, *range(new)], "an answer")


def order(number: int, max_tokens: int = NEW_TOKENS + 1, *, num_samples: int = 1) -> PromptOrder:
    """Return prompt order number `number`: a request for `num_samples` episodes of at most `max_tokens` tokens."""
    problem = Problem(problem_id="p", domain="d", messages=(Message("user", "1"),), ground_truth="")
    sampling = Sampling(num_samples=num_samples, max_tokens=max_tokens)
    return PromptOrder(
        order_id=f"o{number}", index=number, purpose=Purpose.TRAINING, problem=problem, sampling=sampling, seed=number
    )


@asynccontextmanager
async def _opened(gateway: Gateway, sample: _Sampler, number: int) -> AsyncIterator[OpenEpisode]:
    episode, messages = Episode(order(number), 0, EpisodeSection(max_turns=10_000)), conversation()
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
            await _sent(agents, [(opened.base_url(), [_body(conversation())] * REQUESTS)])
            took.append((time.process_time() - began) / REQUESTS * 1000)
    return took


async def _memory(agents: Child) -> float:
    gateway, sample, process = Gateway(), _Sampler(), psutil.Process()
    sample.gate.clear()
    async with asyncio.timeout(_DEADLINE_S), AsyncExitStack() as stack:
        await stack.enter_async_context(gateway.serve())
        before = process.memory_info().rss
        opened = [await stack.enter_async_context(_opened(gateway, sample, number)) for number in range(OPEN)]
        bodies = [_body(conversation())]
        sending = asyncio.create_task(_sent(agents, [(each.base_url(), bodies) for each in opened], _APART_S))
        while sample.waiting < OPEN:
            await asyncio.sleep(0.1)
        taken = process.memory_info().rss - before
        sample.gate.set()
        await sending
    return taken / 2**20


def _real_turns(agents: Child, rounds: int) -> Paired:
    """Return the seconds that all turns take in each round, through the gateway and sent directly to the engine."""
    with tempfile.TemporaryDirectory(prefix="gateway-") as name:
        random_decoder(DebugSize.MB_3).save_pretrained(name)
        with served(EngineOrder(folder=Path(name), slots=EPISODES, context=CONTEXT)) as engine:
            return asyncio.run(_compared(agents, engine.url, rounds))


async def _compared(agents: Child, url: str, rounds: int) -> Paired:
    loop, gateway = asyncio.get_running_loop(), Gateway()
    async with EngineClient() as client, gateway.serve():
        pool = EnginePool(client, [url])

        async def sample(request: ChatCompletionRequest, on_text: OnText | None = None) -> ChatCompletion:
            return (await pool.complete(request, on_text=on_text)).completion

        played = await asyncio.gather(*(_played(number, sample) for number in range(EPISODES)))

        async def direct() -> None:
            await _sent(agents, [(f"{url}/v1", forwarded) for _, forwarded in played])

        async def through_gateway() -> None:
            async with AsyncExitStack() as stack:
                episodes = [Episode(order(number), 0, EpisodeSection()) for number in range(EPISODES)]
                opened = [await stack.enter_async_context(gateway.open(each, sample)) for each in episodes]
                await _sent(agents, [(each.base_url(), own) for each, (own, _) in zip(opened, played, strict=True)])

        arms = {
            "direct": seconds_of(lambda: asyncio.run_coroutine_threadsafe(direct(), loop).result()),
            "gateway": seconds_of(lambda: asyncio.run_coroutine_threadsafe(through_gateway(), loop).result()),
        }
        return await asyncio.to_thread(paired, arms, rounds)


async def _played(number: int, sample: SampleTurn) -> tuple[list[bytes], list[bytes]]:
    """Play an episode; return the agent's requests to the gateway, and the gateway's requests to the engine.

    The seed depends only on `number`, so the engine samples the same tokens if the episode is played again.
    """
    episode, messages = Episode(order(number), 0, EpisodeSection()), list[dict[str, str]]()
    own, forwarded = list[bytes](), list[bytes]()
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"{number} {turn} {_WORDS}"})
        own.append(_body(messages))
        planned = episode.plan("main", json.loads(own[-1]))
        forwarded.append(planned.request.model_dump_json(exclude_none=True, exclude_defaults=True).encode())
        answer = await sample(planned.request)
        episode.record(planned, answer)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    assert all(turn.parent for turn in episode.turns[1:]), "each turn must continue the one before"
    return own, forwarded


def _body(messages: Sequence[Mapping[str, str]]) -> bytes:
    return json.dumps({"model": "m", "messages": messages, "max_tokens": NEW_TOKENS}).encode()


async def _sent(agents: Child, work: Sequence[tuple[str, Sequence[bytes]]], apart_s: float = 0.0) -> None:
    """Start an agent per (base URL, requests), `apart_s` seconds apart; wait until each has sent all its requests."""
    await asyncio.to_thread(agents.call, (work, apart_s), timeout_s=_DEADLINE_S)


def _agents(pipe: Connection) -> None:
    """Run the agents, which send requests on demand; they have a process of their own, whose time is not measured."""
    open_many_files()
    pipe.send("ready")
    while True:
        work, apart_s = pipe.recv()
        asyncio.run(_ask(work, apart_s))
        pipe.send("done")


async def _ask(work: Sequence[tuple[str, Sequence[bytes]]], apart_s: float) -> None:
    headers, timeout = {"content-type": "application/json"}, call_timeout(_DEADLINE_S)
    async with hot_session(token=None, keep_alive_s=15.0) as session:

        async def one(url: str, bodies: Sequence[bytes]) -> None:
            for body in bodies:
                path = f"{url}/chat/completions"
                async with session.post(path, data=body, headers=headers, timeout=timeout) as response:
                    assert response.status == 200, await response.text()
                    await response.read()

        async with asyncio.TaskGroup() as group:
            for url, bodies in work:
                group.create_task(one(url, bodies))
                await asyncio.sleep(apart_s)
