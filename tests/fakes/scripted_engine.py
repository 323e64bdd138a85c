"""`ScriptedEngine`: the smallest engine that keeps the inference contract; with a `Fault` it breaks one promise.

The model is a table of 32 next-token distributions (float32) and a bias. Token i is the character of code 97 + i; token
0 ends an answer. Tokens do not determine their text, so the engine recognises a tool call in an answer only if a prompt
had the same call. It decodes on the event loop, one step per `step_s` seconds. The conformance kit must accept this
engine without a fault, and reject it with any fault.

    python -m tests.fakes.scripted_engine [fault [step_s]]      prints its port, serves until it is killed
"""

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np

from inference_contract.errors import ContextExceeded, DigestMismatch, InvalidRequest, UnknownModel
from inference_contract.routed_experts import RoutedExperts
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
    TokenLogprob,
    TopLogprob,
    Usage,
)
from inference_contract.tools import FunctionCallDelta, ToolCall, ToolCallDelta
from inference_contract.weights import DType, OnUpdate, ParameterSpec, UpdatePhase, WeightLayout
from pipelinerl import rng
from pipelinerl.engines.http.server import create_app
from pipelinerl.engines.weights.weight_receiver import WeightReceiver
from pipelinerl.errors import UpdateError
from pipelinerl.plugins.parameter_server.download import WeightPuller
from pipelinerl.system.http_service import listen, serve
from pipelinerl.weights.layout import converted_by
from pipelinerl.weights.pull import Shard
from tests.fakes.scripted_faults import Fault

VOCAB = 32
CONTEXT = 192
MODEL = "models/scripted"
LAYOUT = WeightLayout(
    parameters=(
        ParameterSpec(name="table.weight", shape=(VOCAB, VOCAB), dtype=DType.FLOAT32),
        ParameterSpec(name="table.bias", shape=(VOCAB,), dtype=DType.FLOAT32),
    )
)


@dataclass(slots=True)
class _Sample:
    index: int
    key: np.ndarray
    last: int
    before: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    shown: int = 0
    told_end: bool = False
    reason: FinishReason | None = None
    prefix: list[int] = field(default_factory=list)
    fault: Fault = Fault.NONE

    def text(self, stops):
        """Return the sample's text, and whether a stop string ended it."""
        before = [] if self.fault is Fault.STOPS_IN_NEW_TEXT_ONLY else self.prefix
        whole = "".join(chr(97 + token) for token in [*before, *self.tokens] if token)
        cuts = [whole.index(stop) for stop in stops if stop in whole]
        return (whole[: min(cuts)], True) if cuts else (whole, False)


@final
class _Pull:
    """A `PullSource` that pulls weights correctly, or breaks one promise as the fault says."""

    def __init__(self, fault, token):
        self._fault = fault
        self._puller = WeightPuller(token=None if fault is Fault.PULLS_WITHOUT_TOKEN else token)

    def fetch(self, order, *, into, on_progress):
        if self._fault is Fault.PULLS_FROM_FIRST_ONLY:
            order = replace(order, shards=tuple(replace(one, sources=one.sources[:1]) for one in order.shards))
        if self._fault is Fault.PULLS_FIRST_SHARD:
            order = replace(order, shards=(Shard(order.shards[0].sources, ((0, len(into)),)),))
        if self._fault is Fault.PULLS_ELSEWHERE:
            into = np.empty_like(into)
        try:
            return self._puller.fetch(order, into=into, on_progress=on_progress)
        except DigestMismatch:
            if self._fault is Fault.PULLS_WRONG_BYTES:
                return order.digest
            raise
        except UpdateError:
            if self._fault is Fault.SERVES_HALF_A_PULL:
                return order.digest
            raise


@final
class ScriptedEngine:
    """Satisfies `Engine`, and also `WeightTarget`, so that the real `WeightReceiver` can update its weights."""

    def __init__(self, fault=Fault.NONE, *, step_s=0.0005, token=None):
        self._fault = fault
        self._token = token
        self._step_s = step_s
        self._buffers = [self._initial(), np.zeros(LAYOUT.num_bytes, np.uint8)]
        self._serving = (0, 0)
        self._aborts = 0
        self._running = 0  # number of running requests
        self._running_sequences = 0
        self._admits = asyncio.Event()
        self._admits.set()
        self._abandoned: set[asyncio.Task[None]] = set()
        self._counts = {"generated_tokens_total": 0, "prompt_tokens_total": 0}
        self._calls: dict[tuple[int, ...], ToolCall] = {}
        self._receiver: WeightReceiver

    @staticmethod
    def _initial():
        return rng.generator(0, "scripted").normal(size=LAYOUT.num_bytes // 4).astype(np.float32).view(np.uint8)

    # --- weights -------------------------------------------------------------------------------------------------

    @property
    def layout(self):
        return LAYOUT

    def staging(self):
        return self._buffers[0 if self._fault is Fault.SERVES_STAGED else 1]

    def finish_staging(self):
        if self._fault is Fault.REINTERPRETS and self._receiver._wire not in (None, LAYOUT):
            sent = self._receiver._unconverted
            self._buffers[1][: len(sent)] = sent

    def serving(self):
        return self._serving

    async def commit(self, *, version, epoch, on_update):
        if on_update is OnUpdate.ABORT:
            self._aborts += 1
        if on_update is OnUpdate.DRAIN and self._fault is not Fault.IGNORES_DRAIN:
            self._admits.clear()
            while self._running:
                await asyncio.sleep(self._step_s)
            self._admits.set()
        if self._fault not in (Fault.IGNORES_WEIGHTS, Fault.SERVES_STAGED):
            self._buffers.reverse()
        self._serving = (epoch, version)
        return 0.0

    async def init_process_group(self, request):
        if self._fault is Fault.LEAVES_FOR_ANY_JOIN and request.world_size > 2:
            await self._receiver.close()
        if self._fault is Fault.LOWER_GENERATION and self._receiver._member._membership is not None:
            known = self._receiver._member._membership.request
            if request.generation < known.generation:
                request = known
        return await self._receiver.init_process_group(request)

    async def request_weight_update(self, request):
        if self._fault is Fault.ACCEPTS_ANY_LAYOUT and request.layout is not None:
            request = request.model_copy(update={"layout": LAYOUT})
        if self._fault is Fault.ACCEPTS_OLDER and request.phase is UpdatePhase.PREPARE:
            self._serving = min(self._serving, (request.epoch, request.version - 1))
        update = self._receiver._update
        if self._fault is Fault.IGNORES_DIGEST and request.phase is UpdatePhase.COMMIT and update is not None:
            while not update.incoming.received.done():
                await asyncio.sleep(0.001)
            if not update.incoming.failed:
                request = request.model_copy(update={"digest": update.incoming.received.result().digest})
        if self._fault is Fault.REPREPARES and request.phase is UpdatePhase.PREPARE and update is not None:
            request = update.request if not update.replaceable else request
        if self._fault is Fault.COMMITS_ON_ABORT and request.phase is UpdatePhase.ABORT:
            self._serving = (request.epoch, request.version)
        return await self._receiver.request_weight_update(request)

    # --- generation ----------------------------------------------------------------------------------------------

    def _samples(self, request):
        if request.model not in (None, MODEL, "scripted" if self._fault is not Fault.WANTS_WHOLE_NAME else None):
            raise UnknownModel(f"this engine serves {MODEL!r}, got {request.model!r}", param="model")
        if request.response_format is not None and self._fault is not Fault.ANSWERS_FREELY:
            raise InvalidRequest("there is no structured output here", param="response_format")
        if self._fault is Fault.FAILS_AT_LARGE_TOP_K and request.top_k > VOCAB:
            raise OverflowError("no such number of tokens")
        if self._fault is not Fault.OPENS_TEMPLATE and "chat_template" in request.chat_template_kwargs:
            raise InvalidRequest("the template is the engine's", param="chat_template_kwargs")
        prompt = request.prompt_token_ids or self._rendered(request)
        if self._fault is Fault.TRUNCATES_PROMPT:
            prompt = prompt[-8:]
        room = CONTEXT - len(prompt)
        if room < 1 or not all(0 <= token < VOCAB for token in prompt):
            kind = ContextExceeded if room < 1 else InvalidRequest
            raise kind("the prompt must be shorter, and of known tokens", param="prompt_token_ids")
        if self._fault is Fault.RETOKENIZES and request.prompt_token_ids:
            prompt = [*prompt, 1]
        seed = 0 if request.seed is None else request.seed
        if self._fault is Fault.IGNORES_SEED:
            seed = self._counts["prompt_tokens_total"]
        if self._fault is Fault.NOISE_BY_BATCH:
            seed += request.n
        self._counts["prompt_tokens_total"] += len(prompt)
        prefixes = request.prefixes or [AnswerPrefix(index=index, token_ids=[]) for index in range(request.n)]
        limit = min(request.token_limit or room, room)
        if self._fault is Fault.RENUMBERS_SAMPLES:
            seed += len(prefixes) - 1 - prefixes[-1].index
        return prompt, [self._begun(request, prompt, prefix, seed, limit) for prefix in prefixes], limit

    def _rendered(self, request):
        """Return the prompt's tokens: the tools' descriptions, then the messages; token 0 ends an answer."""
        if request.prompt and self._fault is not Fault.IGNORES_TEXT:
            return _encoded(request.prompt)
        text = "".join(tool.function.description or "" for tool in self._offered(request))
        if self._fault is Fault.OPENS_TEMPLATE:
            text += "".join(request.chat_template_kwargs)
        messages, first_new = request.messages or [], request.continue_from or 0
        turns = [self._turn(message) for message in messages]
        known = request.continue_token_ids
        if known is None or self._fault is Fault.RENDERS_ANEW:
            return [*_encoded(text), *(token for turn in turns for token in turn)]
        if self._fault is Fault.WRAPS_CONTINUED_TOKENS:
            known = [token % VOCAB for token in known]
        if not all(0 <= token < VOCAB for token in known):
            raise InvalidRequest("unknown tokens", param="continue_token_ids")
        ends = known[-1] != 0 if self._fault is not Fault.ENDS_TURNS_TWICE else True
        closing = [0] if ends and self._fault is not Fault.FORGETS_END_OF_TURN else []
        return [*known, *closing, *(token for turn in turns[first_new:] for token in turn)]

    def _turn(self, message):
        if message.role == "tool" and self._fault is Fault.DROPS_TOOL_RESULTS:
            return []
        text = message.content
        if self._fault is Fault.SPELLS_TOKENS:
            text = text.replace("<|end|>", chr(VOCAB - 2))
        tokens = _encoded(text)
        for call in message.tool_calls or ():
            written = _encoded(call.model_dump_json(exclude={"id"}))
            self._calls[tuple(written)] = call
            tokens += written
        return [*tokens, 0] if message.role == "assistant" else tokens

    def _offered(self, request):
        is_off = request.tool_choice == "none" or self._fault is Fault.DROPS_TOOLS
        return () if is_off else request.tools or ()

    def _message(self, request, sample):
        tokens = tuple(token for token in [*sample.prefix, *sample.tokens] if token)
        call = self._calls.get(tokens) if self._offered(request) or self._fault is Fault.CALLS_UNOFFERED else None
        if call is None or self._fault is Fault.LEAVES_CALLS_IN_TEXT:
            return AssistantMessage(content=sample.text(request.stop_strings)[0])
        return AssistantMessage(content="", tool_calls=[call])

    def _reason(self, request, sample):
        reason = sample.reason or FinishReason.ABORT
        calls = reason is FinishReason.STOP and self._message(request, sample).tool_calls
        return FinishReason.TOOL_CALLS if calls and self._fault is not Fault.STOPS_AFTER_CALLS else reason

    def _begun(self, request, prompt, prefix, seed, limit):
        index, given = prefix.index, prefix.token_ids
        if self._fault is Fault.WRAPS_UNKNOWN_PREFIX:
            given = [token % VOCAB for token in given]
        if not all(0 <= token < VOCAB for token in given):
            raise InvalidRequest(f"the prefix of sample {index} must be of known tokens", param="prefixes")
        key, last = rng.sample_keys(seed, index + 1)[index:], [*prompt, *given][-1]
        if request.continue_token_ids and self._fault is Fault.SAMPLES_AFTER_KNOWN:
            last = request.continue_token_ids[-1]
        sample = _Sample(index, key, last, last, fault=self._fault)
        sample.prefix = [] if self._fault is Fault.FORGETS_PREFIX else given
        ended = (0 in given and not request.ignore_eos) or len(given) >= limit or sample.text(request.stop_strings)[1]
        if ended and self._fault is not Fault.TAKES_ENDED_PREFIX:
            raise InvalidRequest(f"sample {index} has ended", param="prefixes")
        return sample

    def _step(self, request, sample, limit):
        weights = self._buffers[0].view(np.float32)
        logits = weights[: VOCAB * VOCAB].reshape(VOCAB, VOCAB)[sample.last] + weights[VOCAB * VOCAB :]
        scaled = self._changed(request, sample, logits.astype(np.float64)) / (request.temperature or 1.0)
        policy = scaled - np.logaddexp.reduce(scaled)
        if request.top_k and not (request.policy_logprobs and self._fault is Fault.KEEPS_EVERY_TOKEN):
            scaled[np.argsort(-scaled, kind="stable")[request.top_k :]] = -np.inf
        if request.min_p and self._fault is not Fault.IGNORES_MIN_P:
            scaled[scaled < scaled.max() + np.log(request.min_p)] = -np.inf
        logp = scaled - scaled.max()
        logp -= np.log(np.exp(logp).sum())
        before = 0 if self._fault is Fault.RESTARTS_NOISE else len(sample.prefix)
        noise = rng.uniform(sample.key, np.array([before + len(sample.tokens)]))[0]
        greedy = request.temperature == 0.0
        token = int(np.argmax(logp) if greedy else np.searchsorted(np.cumsum(np.exp(logp)), noise).clip(0, VOCAB - 1))
        raw = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        logprob = float(raw[token] if self._fault is Fault.RAW_LOGPROBS else logp[token])
        if request.policy_logprobs and self._fault is not Fault.IGNORES_POLICY_LOGPROBS:
            logprob = float(policy[token])
        shown = raw if self._fault is Fault.RAW_TOP_LOGPROBS else logp
        likeliest = [int(each) for each in np.argsort(-shown, kind="stable")[: request.top_logprobs or 0]]
        sample.top.append([(each, float(shown[each])) for each in likeliest if shown[each] > -np.inf])
        sample.last = token
        sample.tokens.append(token)
        sample.logprobs.append(-logprob if self._fault is Fault.POSITIVE_LOGPROBS else logprob)
        sample.versions.append(self._serving[1])
        self._counts["generated_tokens_total"] += self._fault is not Fault.COUNTS_NOTHING
        ends = token == 0 and (self._fault is Fault.HEEDS_EOS or not request.ignore_eos)
        if ends or sample.text(request.stop_strings)[1]:
            sample.reason = FinishReason.STOP
        elif len(sample.tokens) + (self._fault is not Fault.COUNTS_LIMIT_ANEW) * len(sample.prefix) >= limit:
            sample.reason = FinishReason.LENGTH

    def _changed(self, request, sample, logits):
        for token, bias in (request.logit_bias or {}).items():
            if token >= VOCAB:
                raise InvalidRequest("no such token", param="logit_bias")
            logits[token] += bias * (self._fault is not Fault.IGNORES_BIAS)
        for token in set(sample.tokens) if self._fault is not Fault.COUNTS_NO_REPEATS else ():
            logits[token] -= request.presence_penalty + sample.tokens.count(token) * request.frequency_penalty
        return logits

    async def _steps(self, request, samples, limit):
        await self._admits.wait()
        aborts = self._aborts
        self._running += 1
        self._running_sequences += len(samples)
        try:
            while any(sample.reason is None for sample in samples):
                for sample in samples:
                    if sample.reason is None and self._aborts != aborts:
                        sample.reason = FinishReason.ABORT
                    if sample.reason is None:
                        self._step(request, sample, limit)
                yield
                await asyncio.sleep(self._step_s)
        finally:
            self._running -= 1
            self._running_sequences -= len(samples)

    async def _rest(self, request, samples, limit):
        async for _ in self._steps(request, samples, limit):
            pass

    def _spans(self, versions, start=0):
        if self._fault in (Fault.ONE_SPAN, Fault.NEWEST_SPAN) and versions:
            versions = [versions[0 if self._fault is Fault.ONE_SPAN else -1]] * len(versions)
        spans: list[tuple[int, int]] = []
        for version in versions[start : 1 if self._fault is Fault.SHORT_SPANS else None]:
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1] + 1)
            else:
                spans.append((version, 1))
        return spans

    def _logprobs(self, sample, start=0):
        rows = zip(sample.tokens[start:], sample.logprobs[start:], sample.top[start:], strict=True)
        return ChoiceLogprobs(
            content=[
                TokenLogprob(
                    token=chr(97 + token),
                    logprob=logprob,
                    top_logprobs=[TopLogprob(token=chr(97 + each), logprob=value) for each, value in top],
                )
                for token, logprob, top in rows
            ]
        )

    def _routed(self, request, tokens):
        """Return the routing of one layer with one expert for each token: expert i computes token i."""
        if not request.return_routed_experts or self._fault is Fault.FORGETS_ROUTING:
            return None
        return RoutedExperts.of("uint8", (len(tokens), 1, 1), bytes(tokens))

    def _told(self, sample):
        return [*sample.prefix, *sample.tokens] if self._fault is Fault.REPEATS_PREFIX else sample.tokens

    async def complete(self, request):
        prompt, samples, limit = self._samples(request)
        epoch, version = self._serving
        await self._rest(request, samples, limit)
        ids = request.return_token_ids
        completion_tokens = sum(len(sample.tokens) for sample in samples)
        return ChatCompletion(
            id="scripted-1",
            created=0,
            model=MODEL,
            choices=[
                Choice(
                    index=sample.index,
                    message=self._message(request, sample),
                    finish_reason=self._reason(request, sample),
                    logprobs=self._logprobs(sample) if request.logprobs else None,
                    token_ids=self._told(sample) if ids else None,
                    token_logprobs=sample.logprobs if ids else None,
                    version_spans=self._spans(sample.versions) if ids else None,
                    routed_experts=self._routed(request, [sample.before, *sample.tokens][:-1]),
                )
                for sample in samples
            ],
            usage=Usage(
                prompt_tokens=len(prompt),
                completion_tokens=completion_tokens,
                total_tokens=len(prompt) + completion_tokens,
            ),
            prompt_token_ids=prompt if ids else None,
            prompt_routed_experts=self._routed(request, prompt[:-1]),
            prompt_logprobs=self._scored(request, prompt) if request.return_prompt_logprobs else None,
            model_version=version,
            epoch=epoch,
        )

    def _scored(self, request, prompt):
        weights = self._buffers[0].view(np.float32)
        before = prompt[1:] if self._fault is Fault.SHIFTS_PROMPT_LOGPROBS else prompt[:-1]
        logits = weights[: VOCAB * VOCAB].reshape(VOCAB, VOCAB)[before] + weights[VOCAB * VOCAB :]
        scaled = logits / (1.0 if self._fault is Fault.SCORES_AT_ONE else request.temperature)
        logp = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
        return [0.0, *logp[np.arange(len(before)), prompt[1:]].tolist()]

    async def stream(self, request):
        prompt, samples, limit = self._samples(request)
        if self._fault is Fault.STREAM_DIFFERS:
            for sample in samples:
                sample.last = (sample.last + 1) % VOCAB
        interval_s = request.stream_options.interval_s if request.stream_options else 0.0
        opening, epoch, told_at = prompt if request.return_token_ids else None, self._serving[0], time.monotonic()
        try:
            async for _ in self._steps(request, samples, limit):
                runs = any(sample.reason is None for sample in samples)
                rare = interval_s and self._fault is not Fault.IGNORES_INTERVAL
                if rare and runs and time.monotonic() < told_at + interval_s:
                    continue
                parts = [self._part(request, sample) for sample in samples if sample.shown < len(sample.tokens)]
                ended = [self._end(request, sample) for sample in samples if sample.reason and not sample.told_end]
                opened = None if opening is None else self._routed(request, prompt[:-1])
                yield self._chunk([*parts, *ended], epoch, opening=opening, routed=opened)
                opening, told_at = None, time.monotonic()
        finally:
            if self._fault is Fault.NEVER_FREES:
                self._abandoned.add(asyncio.create_task(self._rest(request, samples, limit)))
        if request.stream_options is not None and request.stream_options.include_usage:
            total = sum(len(sample.tokens) for sample in samples)
            usage = Usage(prompt_tokens=len(prompt), completion_tokens=total, total_tokens=len(prompt) + total)
            yield self._chunk([], epoch, usage)

    def _part(self, request, sample):
        start, sample.shown = sample.shown, len(sample.tokens)
        ids = request.return_token_ids
        # With stop strings, text is sent only at the end, because a stop string may take back text already decoded.
        early = not (request.stop_strings or sample.prefix) or self._fault is Fault.STREAMS_STOP_STRING
        text = "".join(chr(97 + token) for token in sample.tokens[start:] if token) if early else None
        return ChunkChoice(
            index=sample.index,
            delta=Delta(content=text),
            logprobs=self._logprobs(sample, start) if request.logprobs else None,
            token_ids=sample.tokens[start:] if ids else None,
            token_logprobs=sample.logprobs[start:] if ids else None,
            version_spans=self._spans(sample.versions, start) if ids else None,
            routed_experts=self._routed(request, [sample.before, *sample.tokens][start:-1]),
        )

    def _end(self, request, sample):
        sample.told_end = True
        late = (request.stop_strings or sample.prefix) and self._fault is not Fault.STREAMS_STOP_STRING
        message = self._message(request, sample)
        calls = [
            ToolCallDelta(index=place, id=call.id, function=FunctionCallDelta(**call.function.model_dump()))
            for place, call in enumerate(message.tool_calls or ())
            if self._fault is not Fault.DROPS_STREAMED_CALLS
        ]
        delta = Delta(content=message.content if late else None, tool_calls=calls or None)
        return ChunkChoice(index=sample.index, delta=delta, finish_reason=self._reason(request, sample))

    def _chunk(self, parts, epoch, usage=None, *, opening=None, routed=None):
        return ChatCompletionChunk(
            id="scripted-1",
            created=0,
            model=MODEL,
            choices=parts,
            usage=usage,
            prompt_token_ids=opening,
            prompt_routed_experts=routed,
            model_version=self._serving[1],
            epoch=epoch,
        )

    # --- state ---------------------------------------------------------------------------------------------------

    async def start(self):
        self._receiver = WeightReceiver(self, pull=_Pull(self._fault, self._token))

    async def close(self):
        await self._receiver.close()

    def model_card(self):
        epoch, version = self._serving
        return ModelCard(
            id=MODEL,
            model_version=version,
            epoch=epoch,
            context_length=CONTEXT,
            layout=LAYOUT,
            layout_id=LAYOUT.layout_id,
            converts=converted_by(LAYOUT),
            digest=self._receiver.digest,
        )

    def health(self):
        return Health(
            state=EngineState.READY,
            model_version=self._serving[1],
            epoch=self._serving[0],
            continuation=Continuation.SAME_NOISE,
        )

    def metrics(self):
        epoch, version = self._serving
        running = self._running_sequences
        return EngineMetrics(running_sequences=running, model_version=version, epoch=epoch, **self._counts)


def _encoded(text):
    return [1 + ord(char) % (VOCAB - 1) for char in text]


#: How a fault in validation changes the body of a chat request before it is validated.
MENDS = {
    Fault.DROPS_UNKNOWN_FIELDS: lambda body: {
        name: value for name, value in body.items() if name in ChatCompletionRequest.model_fields
    },
    Fault.REFUSES_DEFAULTS: lambda body: body | {f"{name}_": value for name, value in body.items() if value is None},
    Fault.TAKES_HALF_A_CONTINUATION: lambda body: {
        name: value
        for name, value in body.items()
        if not name.startswith("continue_") or {"continue_token_ids", "continue_from"} <= body.keys()
    },
    Fault.CLAMPS_TOP_K: lambda body: body | {"top_k": min(body["top_k"], VOCAB)},
}


class Forgives:
    """ASGI wrapper that applies one of `MENDS` to chat requests."""

    def __init__(self, app, mends):
        self._app = app
        self._mends = mends

    async def __call__(self, scope, receive, send):
        async def stripped():
            message = await receive()
            try:
                mended = self._mends(json.loads(message["body"]))
                return message | {"body": json.dumps(mended).encode()}
            except (KeyError, ValueError, TypeError):
                return message

        chat = scope["type"] == "http" and scope["path"].startswith("/v1/chat")
        await self._app(scope, stripped if chat else receive, send)


def application(fault=Fault.NONE, *, token=None, step_s=0.0005):
    app = create_app(ScriptedEngine(fault, step_s=step_s, token=token), token=token)
    if fault in MENDS:
        app.add_middleware(Forgives, mends=MENDS[fault])
    return app


if __name__ == "__main__":
    fault, step_s, *_ = *sys.argv[1:], *("none", "0.0005")[len(sys.argv) - 1 :]
    with listen("127.0.0.1", 0) as bound:
        print(bound.getsockname()[1], flush=True)
        serve(application(Fault(fault), step_s=float(step_s)), bound)
