"""`MockEngine`: everything of an engine but a model and its bytes; so many fit a process that a thousand fit a machine.

It keeps the inference contract as the conformance kit asks about it, but for what is about weights: it has none, so an
update changes its version and nothing else, and it joins no process group. Its tokens are drawn evenly from `VOCAB` by
the request's seed; what a token takes is a wait. How long an answer takes, and whether a request is refused because the
engine is full, are functions of the seed, too.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final, final

import numpy as np

from inference_contract.errors import (
    ContextExceeded,
    DigestMismatch,
    InvalidRequest,
    LayoutMismatch,
    NotPrepared,
    Overloaded,
    StaleVersion,
    UnknownModel,
)
from inference_contract.schemas import (
    AnswerPrefix,
    AssistantMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    Continuation,
    Delta,
    EngineMetrics,
    EngineState,
    FinishReason,
    Health,
    ModelCard,
    Span,
    TokenLogprob,
    Usage,
)
from inference_contract.weights import (
    DType,
    InitProcessGroupRequest,
    ParameterSpec,
    ProcessGroupStatus,
    UpdatePhase,
    UpdateStatus,
    WeightLayout,
    WeightUpdateRequest,
    WeightUpdateResponse,
)
from pipelinerl import rng

VOCAB: Final = 32
CONTEXT: Final = 512
LAYOUT: Final = WeightLayout(parameters=(ParameterSpec(name="none", shape=(8,), dtype=DType.INT8),))
_MODEL: Final = "mock"
_NORMAL: Final = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long answers of `tokens` take: log-normal around `median_s`; longer ones take longer.

    Of requests a share `full` is refused since there is no room. A new version's weights are there `fetch_s` after they
    were announced; until then its COMMIT waits.
    """

    median_s: float
    tokens: int = 16
    spread: float = 0.25
    full: float = 0.0
    fetch_s: float = 0.0

    def seconds(self, seed: int) -> float:
        """Of an answer of `tokens` to the request of this seed, on any engine."""
        (drawn,) = rng.uniform(rng.sample_keys(rng.key(seed, "pace"), 1), np.zeros(1, np.int64))
        return self.median_s * math.exp(self.spread * _NORMAL.inv_cdf(min(max(float(drawn), 1e-6), 1 - 1e-6)))

    def refuses(self, seed: int, engine: int) -> bool:
        """Is this engine full when the request of this seed comes? Another is not."""
        return self.full > 0 and rng.key(seed, "full", engine) % 10**6 < self.full * 10**6


@final
@dataclass(slots=True)
class _Sampled:
    """One sample, whole from the beginning; it is told as time passes."""

    index: int
    prefix: list[int]
    tokens: list[int]
    logprob: float
    reason: FinishReason
    text: str
    told: int = 0
    ended: bool = False


def _text(tokens: Sequence[int]) -> str:
    return "".join(chr(97 + token) for token in tokens if token)


def _sampled(request: ChatCompletionRequest, prefixes: Sequence[AnswerPrefix], limit: int) -> list[_Sampled]:
    """The samples, whole: each a function of the request's seed, its index and its positions, and of nothing else."""
    choices = 1 if request.temperature == 0.0 else min(request.top_k or VOCAB, VOCAB)
    indices, lengths = [prefix.index for prefix in prefixes], [len(prefix.token_ids) for prefix in prefixes]
    keys = rng.sample_keys(request.seed or 0, max(indices) + 1)[indices]
    places = np.array(lengths, np.int64)[:, None] + np.arange(limit, dtype=np.int64)
    drawn = (rng.uniform(keys[:, None], places) * choices).astype(np.int64) if choices > 1 else np.ones_like(places)
    rows = zip(prefixes, lengths, drawn.tolist(), strict=True)
    return [_ended(request, prefix, tokens[: limit - length], choices) for prefix, length, tokens in rows]


def _ended(request: ChatCompletionRequest, prefix: AnswerPrefix, tokens: list[int], choices: int) -> _Sampled:
    """One sample, up to where a token, a stop string or its length ends it."""
    given, stops, reason = prefix.token_ids, request.stop_strings, FinishReason.LENGTH
    stopped = stops and any(stop in _text(given) for stop in stops)
    if not tokens or stopped or (0 in given and not request.ignore_eos):
        raise InvalidRequest(f"sample {prefix.index} has ended", param="prefixes")
    if choices > 1 and not request.ignore_eos and 0 in tokens:
        tokens, reason = tokens[: tokens.index(0) + 1], FinishReason.STOP
    text = _text([*given, *tokens])
    if any(stop in text for stop in stops):
        reason = FinishReason.STOP
        tokens = next(
            tokens[:count]
            for count in range(1, len(tokens) + 1)
            if any(stop in _text([*given, *tokens[:count]]) for stop in stops)
        )
        text = _text([*given, *tokens])
        text = text[: min(text.index(stop) for stop in stops if stop in text)]
    return _Sampled(prefix.index, given, tokens, -math.log(choices), reason, text)


@final
class _Answer:
    """The samples of one request, and when their tokens come."""

    def __init__(
        self, request: ChatCompletionRequest, prompt: list[int], samples: list[_Sampled], step_s: float
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.samples = samples
        self.began = time.monotonic()
        self._step_s = step_s
        self.ends = self.began + step_s * max(len(sample.tokens) for sample in samples)
        self.aborted_at: float | None = None

    def due(self, sample: _Sampled) -> int:
        """How many of the sample's tokens have come by now."""
        now = time.monotonic() if self.aborted_at is None else self.aborted_at
        steps = len(sample.tokens) if now >= self.ends else int((now - self.began) / self._step_s)
        return min(len(sample.tokens), steps)

    def at(self, place: int) -> float:
        """When the token at that place of a sample came."""
        return self.began + self._step_s * (place + 1)

    @property
    def is_over(self) -> bool:
        """Has every token come that will?"""
        return self.aborted_at is not None or time.monotonic() >= self.ends


@final
class MockEngine:
    """Satisfies `Engine`. `seen` is told the seed of each request, and when it came."""

    def __init__(self, number: int, pace: Pace, seen: Callable[[int, float], None] = lambda seed, at: None) -> None:
        self._number = number
        self._pace = pace
        self._seen = seen
        self._serving = (0, 0)
        self._commits: list[tuple[float, int]] = [(0.0, 0)]  # when each version began to serve
        self._prepared: WeightUpdateRequest | None = None
        self._running: set[_Answer] = set()
        self._changed = asyncio.Event()
        self._counts: Counter[str] = Counter()
        self.announced: list[float] = []
        """When each PREPARE came."""

    async def start(self) -> None:
        """It is ready."""

    async def close(self) -> None:
        """Nothing runs."""

    # --- generation ----------------------------------------------------------------------------------------------

    def _begin(self, request: ChatCompletionRequest) -> _Answer:
        seed = request.seed or 0
        self._seen(seed, time.monotonic())
        if request.model not in (None, _MODEL):
            raise UnknownModel(f"this engine serves {_MODEL!r}, got {request.model!r}", param="model")
        if self._pace.refuses(seed, self._number):
            raise Overloaded("no room is left; ask another engine")
        if "chat_template" in request.chat_template_kwargs:
            raise InvalidRequest("the template is the engine's", param="chat_template_kwargs")
        if request.return_routed_experts:
            raise InvalidRequest("a mock engine has no experts", param="return_routed_experts")
        text = "".join(message.content for message in request.messages or ())
        prompt = request.prompt_token_ids or [1 + ord(character) % (VOCAB - 1) for character in text]
        room = CONTEXT - len(prompt)
        prefixes = request.prefixes or [AnswerPrefix(index=index, token_ids=[]) for index in range(request.n)]
        given = [token for prefix in prefixes for token in prefix.token_ids]
        if room < 1:
            raise ContextExceeded(f"a prompt must be shorter than {CONTEXT}", param="prompt_token_ids")
        if not all(0 <= token < VOCAB for token in [*prompt, *given]):
            raise InvalidRequest("tokens must be known", param="prompt_token_ids")
        limit = min(request.token_limit or room, room)
        samples = _sampled(request, prefixes, limit)
        answer = _Answer(request, prompt, samples, self._pace.seconds(seed) / self._pace.tokens)
        self._counts["prompt_tokens_total"] += len(prompt)
        self._running.add(answer)
        return answer

    def _end(self, answer: _Answer) -> None:
        self._running.discard(answer)
        self._counts["finished_sequences_total"] += len(answer.samples)
        self._counts["generated_tokens_total"] += sum(answer.due(sample) for sample in answer.samples)

    async def _until(self, answer: _Answer, moment: float) -> None:
        """Until then, or until a commit has ended it."""
        while not answer.is_over and (left := moment - time.monotonic()) > 0:
            changed = self._changed
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await changed.wait()

    def _spans(self, answer: _Answer, start: int, end: int) -> list[Span]:
        """Which versions sampled the tokens in these places."""
        if len(self._commits) == 1 or self._commits[-1][0] < answer.began:
            return [(self._commits[-1][1], end - start)] if end > start else []
        versions = [
            self._commits[bisect_right(self._commits, (answer.at(n), math.inf)) - 1][1] for n in range(start, end)
        ]
        return [(version, count) for version, count in Counter(versions).items()]

    def _choice(self, answer: _Answer, sample: _Sampled, start: int, end: int) -> dict[str, Any]:
        """The fields of a choice, or of a chunk's part of it, that are about the tokens in these places."""
        tokens, ids = sample.tokens[start:end], answer.request.return_token_ids
        rows = [TokenLogprob(token=chr(97 + token), logprob=sample.logprob) for token in tokens]
        return {
            "index": sample.index,
            "logprobs": ChoiceLogprobs(content=rows) if answer.request.logprobs else None,
            "token_ids": tokens if ids else None,
            "token_logprobs": [sample.logprob] * len(tokens) if ids else None,
            "version_spans": self._spans(answer, start, end) if ids else None,
        }

    def _reason(self, answer: _Answer, sample: _Sampled) -> FinishReason | None:
        if answer.due(sample) == len(sample.tokens):
            return sample.reason
        return FinishReason.ABORT if answer.aborted_at is not None else None

    async def complete(self, request: ChatCompletionRequest) -> ChatCompletion:
        """The whole answer, when its time is over."""
        answer, epoch = self._begin(request), self._serving[0]
        try:
            await self._until(answer, answer.ends)
            choices = [
                Choice(
                    message=AssistantMessage(content=sample.text),
                    finish_reason=self._reason(answer, sample) or FinishReason.ABORT,
                    **self._choice(answer, sample, 0, answer.due(sample)),
                )
                for sample in answer.samples
            ]
        finally:
            self._end(answer)
        return ChatCompletion(
            id=_MODEL,
            created=0,
            model=_MODEL,
            choices=choices,
            usage=_usage(answer),
            prompt_token_ids=answer.prompt if request.return_token_ids else None,
            model_version=self._serving[1],
            epoch=epoch,
        )

    async def stream(self, request: ChatCompletionRequest) -> AsyncIterator[ChatCompletionChunk]:
        """What has come, again and again."""
        options, answer, epoch = request.stream_options, self._begin(request), self._serving[0]
        interval_s = max(options.interval_s if options else 0.0, self._pace.median_s / CONTEXT)
        opening = answer.prompt if request.return_token_ids else None

        def chunk(parts: list[ChunkChoice], usage: Usage | None = None) -> ChatCompletionChunk:
            return ChatCompletionChunk(
                id=_MODEL,
                created=0,
                model=_MODEL,
                choices=parts,
                usage=usage,
                prompt_token_ids=opening,
                model_version=self._serving[1],
                epoch=epoch,
            )

        try:
            while not all(sample.ended for sample in answer.samples):
                await self._until(answer, min(time.monotonic() + interval_s, answer.ends))
                if parts := self._news(answer):
                    yield chunk(parts)
                    opening = None
        finally:
            self._end(answer)
        if options is not None and options.include_usage:
            yield chunk([], _usage(answer))

    def _news(self, answer: _Answer) -> list[ChunkChoice]:
        """What has come since the last chunk. Text waits for the end where it is not only the new tokens'."""
        parts = []
        late = bool(answer.request.stop_strings)
        for sample in answer.samples:
            start, end, reason = sample.told, answer.due(sample), self._reason(answer, sample)
            if sample.ended or (end == start and reason is None):
                continue
            late = late or bool(sample.prefix)
            text = (sample.text if reason else None) if late else _text(sample.tokens[start:end])
            sample.told, sample.ended = end, reason is not None
            parts.append(
                ChunkChoice(delta=Delta(content=text), finish_reason=reason, **self._choice(answer, sample, start, end))
            )
        return parts

    # --- updates, without weights --------------------------------------------------------------------------------

    async def init_process_group(self, request: InitProcessGroupRequest) -> ProcessGroupStatus:
        """It has no weights to receive."""
        raise InvalidRequest("a mock engine joins no group; publish by the transport pull")

    async def request_weight_update(self, request: WeightUpdateRequest) -> WeightUpdateResponse:
        """Metadata alone: what is prepared, and then committed, is a version."""
        key = request.epoch, request.version
        if request.phase is UpdatePhase.PREPARE:
            self.announced.append(time.monotonic())
        elif request.phase is UpdatePhase.COMMIT and self.announced:
            await asyncio.sleep(max(0.0, self.announced[-1] + self._pace.fetch_s - time.monotonic()))
        if key < self._serving:
            raise StaleVersion(f"this engine serves {self._serving}, got the older {key}")
        status = UpdateStatus.ALREADY_SERVING if key == self._serving else self._taken(key, request)
        return WeightUpdateResponse(status=status, epoch=self._serving[0], version=self._serving[1])

    def _taken(self, key: tuple[int, int], request: WeightUpdateRequest) -> UpdateStatus:
        if request.phase is UpdatePhase.ABORT:
            self._prepared = None
            return UpdateStatus.ABORTED
        prepared = self._prepared
        if request.phase is UpdatePhase.PREPARE:
            layout_id = request.layout_id if request.layout is None else request.layout.layout_id
            if layout_id != LAYOUT.layout_id:
                raise LayoutMismatch("the layout is not this engine's")
            self._prepared = request
            return UpdateStatus.PREPARED
        if prepared is None or (prepared.epoch, prepared.version) != key:
            raise NotPrepared(f"{key} was not prepared")
        if prepared.digest != request.digest:
            raise DigestMismatch("the digests differ")
        self._commit(key, request)
        return UpdateStatus.COMMITTED

    def _commit(self, key: tuple[int, int], request: WeightUpdateRequest) -> None:
        now = time.monotonic()
        self._serving, self._prepared = key, None
        self._commits.append((now, key[1]))
        if request.on_update.value == "abort":
            for answer in self._running:
                answer.aborted_at = now
        self._changed.set()
        self._changed = asyncio.Event()
        self._counts["weight_updates_total"] += 1

    # --- state ---------------------------------------------------------------------------------------------------

    def model_card(self) -> ModelCard:
        """No model, of one parameter."""
        epoch, version = self._serving
        return ModelCard(
            id=_MODEL,
            model_version=version,
            epoch=epoch,
            context_length=CONTEXT,
            layout=LAYOUT,
            layout_id=LAYOUT.layout_id,
        )

    def health(self) -> Health:
        """It is ready."""
        epoch, version = self._serving
        state, goes_on = EngineState.READY, Continuation.SAME_NOISE
        return Health(state=state, model_version=version, epoch=epoch, continuation=goes_on)

    def metrics(self) -> EngineMetrics:
        """Its load, and what it has done."""
        epoch, version = self._serving
        running = sum(len(answer.samples) for answer in self._running)
        under_way = sum(answer.due(sample) for answer in self._running for sample in answer.samples)
        counts = self._counts + Counter(generated_tokens_total=under_way)
        return EngineMetrics(running_sequences=running, slots=VOCAB, model_version=version, epoch=epoch, **counts)


def _usage(answer: _Answer) -> Usage:
    prompt, total = len(answer.prompt), sum(answer.due(sample) for sample in answer.samples)
    return Usage(prompt_tokens=prompt, completion_tokens=total, total_tokens=prompt + total)
