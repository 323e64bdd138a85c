"""`ServerCore`: an `EngineCore` over an unmodified inference server that the user runs; a `ServerApi` talks to the
server.

    trainer ── broadcast, pull ──▶ this process: staged bytes ── the server's API ───▶ server
    actor   ── contract ─────────▶ this process ── one streamed request per sample ──────▶ server

A server reports only at the end of a sample which weights sampled which tokens. A token is therefore delivered
immediately only if no update has begun since its sample began. Any other token waits for the sample's end and the
server's report. The version is never inferred from a token's arrival time.

The engine ends if the server stops responding or behaves unexpectedly (a status other than 200, a broken stream,
weights from another client), because it is then unknown which weights would sample.

| waits for | unblocked by | or, at the latest |
|---|---|---|
| a step of samples | an event of a stream, or its end | the health check: a minute without a response |
| a pause with `drain` | the ends of the running samples | as for a step |
| the response to a call | the server | the call's deadline |
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import resource
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol

import aiohttp
from pydantic_core import from_json

from inference_contract.weights import OnUpdate
from pipelinerl.engines.batching.sequence import Request, Sequence
from pipelinerl.errors import EngineUnreachable, PipelineError, reason_of
from pipelinerl.plugins.external_engines.core_loop import Sampled, Step, label_of, named_by, sample_id
from pipelinerl.system import http_client
from pipelinerl.system.background import cancel_all

_HEALTH: Final = "/health"
#: Timeout in seconds of each cleanup call to a server that has failed.
_LEAVE_S: Final = 3.0
#: Interval in seconds between health checks of a server with running samples.
_ASK_EVERY_S: Final = 5.0
#: The longest time in seconds without a response or an event. Even a busy server responds to health checks.
_SILENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class LabelSpan:
    """Tokens [start, end) of a sample, all sampled by the weights named `label`."""

    label: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a sample's stream: the new tokens. The last event also has the version spans of all tokens."""

    token_ids: list[int]
    logprobs: list[float]
    ended: bool
    spans: list[LabelSpan] = field(default_factory=list)


def release_of(version: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version: (0, 5, 23) for `0.5.23.post1`, and () if there are none."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


class ServerApi(Protocol):
    """Client of one kind of server. All its exceptions are `PipelineError`s."""

    generate: str
    """The path of the route that generates a sample."""

    async def open(self, label: str) -> tuple[str, int]:
        """Check the server, label its weights; return dtype and context length. Raises `ModelError` for wrong flags."""
        ...

    def check(self, request: Request) -> None:
        """Raise `InvalidRequest` if the server cannot serve the request."""
        ...

    def order(self, sequence: Sequence, *, salt: str) -> Mapping[str, Any]:
        """Return the body of the request that streams one sample."""
        ...

    def read(self, event: Mapping[str, Any], *, known: int) -> Chunk:
        """Return an event's new tokens; earlier events of the sample had `known` tokens. Raises `EngineUnreachable`."""
        ...

    async def pause(self, on_update: OnUpdate) -> None:
        """Stop the server between two steps; `abort` ends the samples, and before `drain` they have ended."""
        ...

    async def resume(self) -> None:
        """Resume sampling after a pause."""
        ...

    async def stage(self) -> None:
        """Bring the staged weights closer to the server's model while it samples, to make `load_staged` fast."""
        ...

    async def load_staged(self, label: str) -> None:
        """Load the staged weights under the name `label`."""
        ...

    async def forget_cache(self) -> None:
        """Drop the cache of keys and values; after the pause, the server recomputes prompts and sampled tokens."""
        ...

    async def close(self) -> None:
        """Undo what `open` set up on the server."""
        ...


@dataclass(slots=True)
class _Sample:
    name: str
    label: str
    updates: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    passed_on: int = 0


class ServerCore:
    """A server and its samples; satisfies `EngineCore`.

    Args:
        serving: (epoch, version) of the server's weights, whose label `api` has set on the server.
        silence_s: the time without any response after which the server counts as failed.
        ask_every_s: the interval between health checks while samples are running.
    """

    def __init__(
        self,
        api: ServerApi,
        http: ServerHttp,
        *,
        serving: tuple[int, int],
        silence_s: float = _SILENCE_S,
        ask_every_s: float = _ASK_EVERY_S,
    ) -> None:
        self._api = api
        self._http = http
        self._label = label_of(*serving)
        # Another run's weights may have had the same version on this server, whose cache outlives runs.
        self._of_this_adapter = f"{os.getpid()}-{time.time_ns()}"
        self._updates = 0  # number of updates that have begun
        self._steps: asyncio.Queue[Step | PipelineError] = asyncio.Queue()
        self._following: dict[str, asyncio.Task[None]] = {}
        self._silence_s = silence_s
        self._ask_every_s = ask_every_s
        self._sign_of_life_at = 0.0  # time of the last response, in monotonic seconds
        self._watching: asyncio.Task[None] | None = None

    def check(self, request: Request) -> None:
        self._api.check(request)

    async def add(self, sequences: list[Sequence], *, salt: str) -> None:
        for sequence in sequences:
            sample = _Sample(sample_id(sequence), self._label, self._updates)
            order = self._api.order(sequence, salt=f"{self._of_this_adapter}-{salt}")
            self._following[sample.name] = asyncio.create_task(self._follow(sample, order))
        if self._watching is None or self._watching.done():
            self._sign_of_life_at = time.monotonic()
            self._watching = asyncio.create_task(self._watch())

    async def abort(self, sample_ids: list[str]) -> None:
        for name in sample_ids:
            task = self._following.pop(name, None)
            if task is not None:
                task.cancel()

    async def next_step(self) -> Step:
        """Return the next step. Raises `EngineUnreachable` if the server has failed or stopped responding."""
        step = await self._steps.get()
        if isinstance(step, PipelineError):
            self._http.hurry(_LEAVE_S)
            raise step
        return step

    async def pause(self, on_update: OnUpdate) -> None:
        """Stop between two steps; tokens of running samples are then held back until their sample ends."""
        if on_update is OnUpdate.DRAIN:
            await asyncio.gather(*self._following.values(), return_exceptions=True)
        self._updates += 1
        await self._api.pause(on_update)

    async def resume(self) -> None:
        await self._api.resume()

    async def stage(self) -> None:
        await self._api.stage()

    async def load_staged(self, epoch: int, version: int) -> None:
        label = label_of(epoch, version)
        await self._api.load_staged(label)
        self._label = label

    async def forget_cache(self) -> None:
        await self._api.forget_cache()

    async def close(self) -> None:
        """Close every stream and undo the setup; the server keeps running."""
        try:
            await cancel_all([*self._following.values(), *([self._watching] if self._watching else [])])
            await self._api.close()
        except PipelineError:
            pass  # the server has already ended, so there is nothing to undo
        finally:
            await self._http.close()

    async def _watch(self) -> None:
        while self._following:
            await asyncio.sleep(self._ask_every_s)
            # half the limit on silence, so that one call may fail
            if await self._http.answers(_HEALTH, timeout_s=self._silence_s / 2):
                self._sign_of_life_at = time.monotonic()
            elif time.monotonic() - self._sign_of_life_at > self._silence_s:
                self._steps.put_nowait(
                    EngineUnreachable(
                        f"{self._http.url} has neither answered GET {_HEALTH} nor sent an event for "
                        f"{self._silence_s:g} s while {len(self._following)} samples waited for it; restart it"
                    )
                )
                return

    async def _follow(self, sample: _Sample, order: Mapping[str, Any]) -> None:
        ended = False
        try:
            async for event in self._http.events(self._api.generate, order):
                self._sign_of_life_at = time.monotonic()
                chunk = self._api.read(event, known=len(sample.token_ids))
                sample.token_ids += chunk.token_ids
                sample.logprobs += chunk.logprobs
                ended = ended or chunk.ended
                self._pass_on(sample, chunk)
            if not ended:
                raise EngineUnreachable(f"the stream of sample {sample.name} ended without a finish reason")
        except PipelineError as error:
            self._steps.put_nowait(error)
        except (LookupError, TypeError, ValueError) as error:
            self._steps.put_nowait(EngineUnreachable(f"an event of sample {sample.name} is malformed: {error!r}"))
        finally:
            self._following.pop(sample.name, None)

    def _pass_on(self, sample: _Sample, chunk: Chunk) -> None:
        """Deliver the tokens whose version is known: all tokens, if no update has begun since the sample began."""
        certain = [LabelSpan(sample.label, 0, len(sample.token_ids))] if sample.updates == self._updates else []
        spans = _checked(sample, chunk.spans) if chunk.ended else certain
        arrived, ended = len(chunk.token_ids), chunk.ended
        for span in spans:
            if span.end > sample.passed_on:
                last, new = ended and span is spans[-1], slice(sample.passed_on, span.end)
                sample.passed_on = span.end
                sampled = Sampled(sample.name, sample.token_ids[new], sample.logprobs[new], arrived, last)
                self._steps.put_nowait(Step(named_by(span.label), [sampled]))
                arrived, ended = 0, ended and not last
        if arrived or ended:
            self._steps.put_nowait(Step(None, [Sampled(sample.name, [], [], arrived, ended)]))


def _checked(sample: _Sample, spans: list[LabelSpan]) -> list[LabelSpan]:
    """Return the server's version spans. Raises `EngineUnreachable` if they do not fit the tokens or known weights."""
    count = len(sample.token_ids)
    edges = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != edges[:-1] or edges[-1] != count or edges != sorted(set(edges)):
        raise EngineUnreachable(f"the server's version spans must cover the {count} tokens of a sample, got {spans}")
    for span in spans:
        if not re.fullmatch(r"\d+\.\d+", span.label) or (span.start < sample.passed_on and span.label != sample.label):
            raise EngineUnreachable(
                f"the server sampled with weights {span.label!r}, but this run loaded {sample.label!r}; stop other "
                "clients from updating it, and restart this engine"
            )
    return spans


#: Seconds that the client keeps an idle connection: fewer than uvicorn's default of 5, so that the client closes first.
_KEEP_ALIVE_S: Final = 1.0
#: Timeout in seconds of a call that makes the server do no heavy work.
CALL_S: Final = 60.0
_DATA: Final = b"data: "
_DONE: Final = b"[DONE]"
_SHOWN: Final = 300


class ServerHttp:
    """HTTP client of one stock server, for one event loop: JSON calls with a deadline, and event streams without one.

    An unexpected response becomes an `EngineUnreachable` that names call and response. Creating the client raises this
    process's limit on open files to the maximum, since every sample holds a connection.
    """

    def __init__(self, url: str, *, token: str | None = None) -> None:
        self.url = url
        self._longest_s = math.inf
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the usual soft limit of 1024 would limit the samples
        self._session = http_client.hot_session(token=token, keep_alive_s=_KEEP_ALIVE_S, read_bytes=2**20)

    def hurry(self, longest_s: float) -> None:
        """Limit the timeout of all later calls to `longest_s` seconds."""
        self._longest_s = longest_s

    async def close(self) -> None:
        """Close every connection; the server then frees the memory of the samples that used them."""
        await self._session.close()

    async def get(self, path: str) -> Any:
        return await self._call("GET", path, None, CALL_S)

    async def answers(self, path: str, *, timeout_s: float) -> bool:
        """Return whether a GET gets any response in time, with any status."""
        try:
            async with self._session.get(self.url + path, timeout=http_client.call_timeout(timeout_s)):
                return True
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def post(self, path: str, body: Any = None, *, timeout_s: float = CALL_S, may_fail: bool = False) -> Any:
        """POST a JSON body; return the JSON of a response with status 200, or None for other content.

        Set `may_fail` if the server may answer with an error: uvicorn then closes the connection, so no other call must
        reuse it.
        """
        return await self._call("POST", path, body, timeout_s, headers={"connection": "close"} if may_fail else {})

    async def events(self, path: str, body: Any) -> AsyncIterator[dict[str, Any]]:
        """POST a body and yield the JSON of each server-sent event until `[DONE]`. Raises `EngineUnreachable`."""
        try:
            endless = http_client.call_timeout(math.inf)
            async with self._session.post(self.url + path, json=body, timeout=endless) as answer:
                await self._check("POST", path, answer)
                async for line in answer.content:
                    if line.startswith(_DATA):
                        data = line[len(_DATA) :].strip()
                        if data == _DONE:
                            return
                        yield from_json(data)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EngineUnreachable(f"POST {self.url}{path} was interrupted: {reason_of(error)}") from error
        raise EngineUnreachable(f"POST {self.url}{path}: the stream ended without data: [DONE]; is the server closing?")

    async def _call(
        self, method: str, path: str, body: Any, timeout_s: float, *, headers: Mapping[str, str] = MappingProxyType({})
    ) -> Any:
        timeout_s = min(timeout_s, self._longest_s)
        timeout = http_client.call_timeout(timeout_s)
        try:
            async with self._session.request(
                method, self.url + path, json=body, timeout=timeout, headers=headers
            ) as answer:
                await self._check(method, path, answer)
                content = await answer.read()
                return from_json(content) if answer.content_type == "application/json" else None
        except TimeoutError as error:
            raise EngineUnreachable(f"{method} {self.url}{path} had no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise EngineUnreachable(f"{method} {self.url}{path} failed: {reason_of(error)}") from error

    async def _check(self, method: str, path: str, answer: aiohttp.ClientResponse) -> None:
        if answer.status != 200:
            text = (await answer.text(errors="replace"))[:_SHOWN]
            raise EngineUnreachable(f"{method} {self.url}{path} must answer 200, got {answer.status}: {text}")
