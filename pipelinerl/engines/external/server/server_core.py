"""`ServerCore`: an inference server that somebody runs, used as it is, as an `EngineCore`. A `ServerApi` speaks to it.

    trainer ── broadcast, pull ──▶ this process: staged bytes ── the api's own way ──▶ server
    actor   ── contract ─────────▶ this process ── one streamed request per sample ──────▶ server

A server says which weights sampled which tokens when a sample ends, and not before. So a token is told of at once only
while no update has begun since its sample did; any other waits for the sample's end, and then has the version that the
server names. Nothing is inferred from when a token came.

Whatever the server does that was not asked for (an answer other than 200, a stream cut off, weights that somebody else
has put there) ends the engine: nobody knows any more what it would sample with. So does a server that falls silent.

| waits for | unblocked by | or, at the latest |
|---|---|---|
| a step of samples | an event of a stream, or its end | the watch: a minute without a sign of life |
| a pause with `drain` | the ends of the samples that run | the same |
| an answer to a call | the server | the call's deadline |
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, final

from inference_contract.weights import OnUpdate
from pipelinerl.engines.batching.sequence import Request, Sequence
from pipelinerl.engines.external.engine_core import Sampled, Step, label_of, named_by, sample_id
from pipelinerl.engines.external.server.server_http import ServerHttp
from pipelinerl.errors import EngineUnreachable, PipelineError

_HEALTH: Final = "/health"
#: How long a server that has failed may keep us with each of the calls that take back what was set up.
_LEAVE_S: Final = 3.0
#: How often a server that has samples to make is asked whether it lives.
_ASK_EVERY_S: Final = 5.0
#: How long it may neither answer nor send an event. While it computes it answers: another process of it does that.
_SILENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class LabelSpan:
    """Tokens [start, end) of a sample were sampled by the weights that are called `label`."""

    label: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a sample's stream: the tokens that are new, and with the last one the spans of all."""

    token_ids: list[int]
    logprobs: list[float]
    ended: bool
    spans: list[LabelSpan] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerModel:
    """What a server says of the model that it serves."""

    dtype: str
    context_length: int


class ServerApi(Protocol):
    """How one kind of server is spoken to. Whatever it raises is a `PipelineError`."""

    async def open(self, label: str) -> ServerModel:
        """Check that the server can be used, and call its weights `label`.

        Raises:
            ModelError: it was not started as it must be; the message says what is missing.
        """
        ...

    @property
    def generate(self) -> str:
        """Path that a sample is asked for at."""
        ...

    def check(self, request: Request) -> None:
        """Raise `InvalidRequest` for what the server cannot do."""
        ...

    def order(self, sequence: Sequence, *, salt: str) -> Mapping[str, Any]:
        """The body that asks for a sample, streamed."""
        ...

    def read(self, event: Mapping[str, Any], *, known: int) -> Chunk:
        """What an event brings, beyond the `known` tokens that came before. Raises `EngineUnreachable`."""
        ...

    async def pause(self, on_update: OnUpdate) -> None:
        """Stop between two steps. With `abort`, end what runs; with `drain`, nothing does."""
        ...

    async def resume(self) -> None:
        """Sample again after a pause."""
        ...

    async def load_staged(self, label: str) -> None:
        """The staged weights, and their name."""
        ...

    async def forget_cache(self) -> None:
        """Compute prompts, and what has been sampled, anew when it goes on."""
        ...

    async def close(self) -> None:
        """Take back what was set up at the server."""
        ...


@dataclass(slots=True)
class _Sample:
    """A sample under way: what has come of it, and how many of its tokens were passed on."""

    name: str
    label: str
    updates: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    passed_on: int = 0


@final
class ServerCore:
    """A server and its samples; satisfies `EngineCore`.

    Args:
        serving: (epoch, version) that the server's weights are called, which the api has told it.
        silence_s: a server that has given no sign of life for so long has failed.
        ask_every_s: how often it is asked for one while it has samples to make.
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
        self._updates = 0  # begun so far
        self._steps: asyncio.Queue[Step | PipelineError] = asyncio.Queue()
        self._following: dict[str, asyncio.Task[None]] = {}
        self._silence_s = silence_s
        self._ask_every_s = ask_every_s
        self._sign_of_life_at = 0.0  # monotonic seconds
        self._watching: asyncio.Task[None] | None = None

    def check(self, request: Request) -> None:
        """Raise `InvalidRequest` for what the server cannot do."""
        self._api.check(request)

    async def add(self, sequences: list[Sequence], *, salt: str) -> None:
        """Ask for the samples of one request; returns before the server has been asked."""
        for sequence in sequences:
            sample = _Sample(sample_id(sequence), self._label, self._updates)
            order = self._api.order(sequence, salt=salt)
            self._following[sample.name] = asyncio.create_task(self._follow(sample, order))
        if self._watching is None or self._watching.done():
            self._sign_of_life_at = time.monotonic()
            self._watching = asyncio.create_task(self._watch())

    async def abort(self, sample_ids: list[str]) -> None:
        """Leave these streams, which frees what they hold."""
        for name in sample_ids:
            task = self._following.pop(name, None)
            if task is not None:
                task.cancel()

    async def next_step(self) -> Step:
        """Wait for the next step. Raises `EngineUnreachable` when the server has failed or fallen silent."""
        step = await self._steps.get()
        if isinstance(step, PipelineError):
            self._http.hurry(_LEAVE_S)
            raise step
        return step

    async def pause(self, on_update: OnUpdate) -> None:
        """Stop between two steps; from here on tokens wait for the end of their sample."""
        if on_update is OnUpdate.DRAIN:
            await asyncio.gather(*self._following.values(), return_exceptions=True)
        self._updates += 1
        await self._api.pause(on_update)

    async def resume(self) -> None:
        """Sample again after a pause."""
        await self._api.resume()

    async def load_staged(self, epoch: int, version: int) -> None:
        """Bring the staged weights to the server."""
        label = label_of(epoch, version)
        await self._api.load_staged(label)
        self._label = label

    async def forget_cache(self) -> None:
        """The server computes what it has cached anew."""
        await self._api.forget_cache()

    async def close(self) -> None:
        """Leave every stream and the server, which goes on without us."""
        tasks = [*self._following.values(), *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._api.close()
        except PipelineError:
            pass  # it is gone already
        finally:
            await self._http.close()

    async def _watch(self) -> None:
        """While there are samples, ask the server for a sign of life; end the engine when none comes."""
        while self._following:
            await asyncio.sleep(self._ask_every_s)
            if await self._http.answers(_HEALTH, timeout_s=self._silence_s / 2):  # so that one lost call is no silence
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
                raise EngineUnreachable(f"the stream of sample {sample.name} had no end")
        except PipelineError as error:
            self._steps.put_nowait(error)
        except (LookupError, TypeError, ValueError) as error:
            self._steps.put_nowait(EngineUnreachable(f"an event of sample {sample.name} lacks something: {error!r}"))
        finally:
            self._following.pop(sample.name, None)

    def _pass_on(self, sample: _Sample, chunk: Chunk) -> None:
        """Deliver what came, as far as it is certain which weights sampled it."""
        certain = [LabelSpan(sample.label, 0, len(sample.token_ids))] if sample.updates == self._updates else []
        spans = _checked(sample, chunk.spans) if chunk.ended else certain
        arrived, ended = len(chunk.token_ids), chunk.ended
        for span in spans:
            if span.end > sample.passed_on:
                last = ended and span is spans[-1]
                self._put(sample, span, arrived=arrived, ended=last)
                arrived, ended = 0, ended and not last
        if arrived or ended:
            self._steps.put_nowait(Step(None, [Sampled(sample.name, [], [], arrived, ended)]))

    def _put(self, sample: _Sample, span: LabelSpan, *, arrived: int, ended: bool) -> None:
        new = slice(sample.passed_on, span.end)
        sample.passed_on = span.end
        sampled = Sampled(sample.name, sample.token_ids[new], sample.logprobs[new], arrived, ended)
        self._steps.put_nowait(Step(named_by(span.label), [sampled]))


def _checked(sample: _Sample, spans: list[LabelSpan]) -> list[LabelSpan]:
    """The server's account of a sample, if it can be true. Raises `EngineUnreachable`."""
    count = len(sample.token_ids)
    edges = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != edges[:-1] or edges[-1] != count or edges != sorted(set(edges)):
        raise EngineUnreachable(f"the server's version spans must cover the {count} tokens of a sample, got {spans}")
    for span in spans:
        if not re.fullmatch(r"\d+\.\d+", span.label) or (span.start < sample.passed_on and span.label != sample.label):
            raise EngineUnreachable(
                f"the server sampled with weights {span.label!r} where this run has put {sample.label!r}: let nobody "
                "else update it, and start this engine anew"
            )
    return spans
