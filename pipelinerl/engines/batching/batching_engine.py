"""`BatchingEngine`: an engine over any `SampleLoop`; satisfies `inference_contract.engine.Engine`.

The event loop validates, tokenises and answers requests. The sample loop's thread owns the model; by default the sample
loop is a `DecodeLoop` over a `ModelRunner`. The two threads call each other only once per request and once per decode
step that produced results, so HTTP barely slows decoding.

Weight updates go through a `WeightReceiver`. New weights arrive in a second buffer while decoding continues; the swap
happens between two steps.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, Final

from inference_contract.errors import ContextExceeded, ContractError, Dirty, EngineStopped, InvalidRequest, UnknownModel
from inference_contract.schemas import (
    AnswerPrefix,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatMessage,
    Continuation,
    EngineMetrics,
    EngineState,
    Health,
    ModelCard,
    StreamOptions,
)
from inference_contract.tools import ToolDefinition
from inference_contract.weights import (
    InitProcessGroupRequest,
    OnUpdate,
    ProcessGroupStatus,
    WeightLayout,
    WeightUpdateRequest,
    WeightUpdateResponse,
)
from pipelinerl import rng
from pipelinerl.engines.batching.decode_loop import DecodeLoop
from pipelinerl.engines.batching.logit_changes import LogitChange
from pipelinerl.engines.batching.model_runner import ModelRunner
from pipelinerl.engines.batching.sample_loop import LoopBuilder, SampleLoop, ServedModel
from pipelinerl.engines.batching.sequence import Delivery, Request, ResponseWriter, TextWindow
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.weights.group_member import IN_PROCESS, EndpointFactory
from pipelinerl.engines.weights.weight_receiver import WeightReceiver
from pipelinerl.errors import PipelineError, TemplateNameError, UnshownFieldError
from pipelinerl.models.tokenizer import ChatTokenizer, offered_tools
from pipelinerl.system.background import tell
from pipelinerl.weights.layout import converted_by

#: The longest time that `close` waits for the loop's thread to finish its step, in seconds.
_STOP_S: Final = 30.0
_NO_ROUTING: Final = (
    "return_routed_experts must be false: this engine cannot report the experts of this model; serve a mixture of "
    "experts with the torch engine"
)
_NO_SCORES: Final = (
    "return_prompt_logprobs must be false: this engine cannot report the log-probs of given tokens; serve the model "
    "with the torch engine"
)
_CLOSING: Final = "the engine is closing; send the request to another one"


class BatchingEngine:
    """An engine that batches requests over a `SampleLoop`; satisfies `Engine` and `WeightTarget`.

    Args:
        load: builds the runner of a `DecodeLoop`; called on the decode thread.
        loop: builds a `SampleLoop` of another kind; give exactly one of `load` and `loop`.
        endpoints: builds the engine's endpoint in the weight group, the process group over which weights arrive.
        continuation: whether the engine can continue an answer that another engine began, with the same or other noise.
        prefill_tokens: the maximum number of prompt tokens that a `DecodeLoop` admits between two steps.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        load: Callable[[], ModelRunner] | None = None,
        loop: LoopBuilder | None = None,
        tokenizer: ChatTokenizer,
        endpoints: EndpointFactory = IN_PROCESS,
        continuation: Continuation = Continuation.SAME_NOISE,
        prefill_tokens: int = 8192,
    ) -> None:
        if (load is None) == (loop is None):
            raise ValueError("expected exactly one of load and loop")
        self._options = options
        self._tokenizer = tokenizer
        self._continuation = continuation
        self._loop: SampleLoop
        if loop is not None:
            self._loop = loop(self._deliver_from_thread)
        else:
            assert load is not None
            self._loop = DecodeLoop(
                load=load,
                max_waiting=options.max_waiting,
                prefill_tokens=prefill_tokens,
                deliver=self._deliver_from_thread,
            )
        self._receiver = WeightReceiver(self, pull=options.pull, endpoints=endpoints)
        self._waiters: dict[str, tuple[Request, Callable[[Delivery], None]]] = {}
        self._numbers = itertools.count()
        self._model: ServedModel | None = None
        # One thread, so only one prompt at a time takes memory for tokenising.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="tokenise")
        self._is_closing = False
        self._events: asyncio.AbstractEventLoop

    def between_steps(self, call: Callable[[], None]) -> None:
        """Have `call` called once on the thread that computes, before its next step; only with `load`."""
        assert isinstance(self._loop, DecodeLoop)
        self._loop.between_steps(call)

    # --- start and close -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model. Raises the exceptions of `load`. If cancelled, the thread finishes loading, then ends."""
        self._events = asyncio.get_running_loop()
        loading = self._loop.start()
        try:
            self._model = await asyncio.wrap_future(loading)
        except asyncio.CancelledError:
            self._loop.stop(0)
            raise

    async def close(self) -> None:
        """Stop the engine and answer running requests with `EngineStopped`. Closing twice is a no-op."""
        if self._model is None:
            return
        self._is_closing = True
        await self._receiver.close()
        self._encoder.shutdown(wait=False, cancel_futures=True)
        ended = await asyncio.to_thread(self._loop.stop, _STOP_S)
        if not ended:
            stuck = f"the decode thread has not ended its step within {_STOP_S:g} s"
            self._deliver(
                [Delivery(work, is_last=True, error=EngineStopped(stuck)) for work, _ in self._waiters.values()]
            )

    # --- generation ----------------------------------------------------------------------------------------------

    async def complete(self, request: ChatCompletionRequest) -> ChatCompletion:
        """Sample all choices and return them when all have ended. Cancelling the call ends the sampling."""
        work = await self._work(request, streams=False)
        ended: asyncio.Future[Delivery] = self._events.create_future()
        self._submit(work, lambda delivery: None if ended.done() else ended.set_result(delivery))
        try:
            delivery = await ended
        finally:
            self._forget(work)
        if delivery.error is not None:
            raise delivery.error
        return self._writer(request, work).completion()

    async def stream(self, request: ChatCompletionRequest) -> AsyncIterator[ChatCompletionChunk]:
        """Sample all choices; yield new tokens per step or requested interval. Closing the iterator ends sampling."""
        options = request.stream_options or StreamOptions()
        chunks = self._at_intervals(request, options.interval_s) if options.interval_s else self._at_once(request)
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def _at_intervals(
        self, request: ChatCompletionRequest, interval_s: float
    ) -> AsyncGenerator[ChatCompletionChunk]:
        """Yield a chunk every `interval_s` seconds, from the samples' token lists, which the loop's thread fills."""
        work = await self._work(request, streams=False)
        writer = self._writer(request, work)
        ended: asyncio.Future[Delivery] = self._events.create_future()
        self._submit(work, lambda delivery: None if ended.done() else ended.set_result(delivery))
        try:
            while not ended.done():
                await asyncio.wait({ended}, timeout=interval_s)
                chunk = writer.new_tokens(all_of_it=ended.done())
                if chunk is not None:
                    yield chunk
        finally:
            self._forget(work)
        error = ended.result().error
        if error is not None:
            raise error
        if request.stream_options is not None and request.stream_options.include_usage:
            yield writer.usage_chunk(writer.newest_version)

    async def _at_once(self, request: ChatCompletionRequest) -> AsyncGenerator[ChatCompletionChunk]:
        work = await self._work(request, streams=True)
        writer = self._writer(request, work)
        deliveries: asyncio.Queue[Delivery] = asyncio.Queue()
        self._submit(work, deliveries.put_nowait)
        try:
            delivery = await deliveries.get()  # this wait always ends: each request gets tokens, an end or an error
            version = delivery.tokens[0].version if delivery.tokens else self._loop.serving[1]
            if delivery.error is None:
                yield writer.first_chunk(version)
            while True:
                if delivery.error is not None:
                    raise delivery.error
                for token in delivery.tokens:
                    version = token.version
                    yield writer.token_chunk(token)
                if delivery.is_last:
                    break
                delivery = await deliveries.get()
        finally:
            self._forget(work)
        if request.stream_options is not None and request.stream_options.include_usage:
            yield writer.usage_chunk(version)

    async def _work(self, chat: ChatCompletionRequest, *, streams: bool) -> Request:
        model = self._started()
        if self._is_closing:
            raise EngineStopped(_CLOSING)
        if self._receiver.dirty is not None:
            raise Dirty(f"{self._receiver.dirty}; the engine serves again after a full update")
        check_model(chat, self._options.model_id)
        if chat.return_routed_experts and model.route_log is None:
            raise InvalidRequest(_NO_ROUTING, param="return_routed_experts")
        if chat.return_prompt_logprobs and model.scorer is None:
            raise InvalidRequest(_NO_SCORES, param="return_prompt_logprobs")
        prompt = chat.prompt_token_ids or await self._encoded(chat, model)
        param = next(name for name in ("prompt_token_ids", "prompt", "messages") if getattr(chat, name))
        room = room_after(prompt, model, param)
        number = next(self._numbers)
        work = Request(
            request_id=f"chatcmpl-{number}",
            prompt_token_ids=prompt,
            token_limit=room if chat.token_limit is None else min(chat.token_limit, room),
            temperature=chat.temperature,
            top_p=chat.top_p,
            top_k=chat.top_k if chat.top_k < model.vocab_size else 0,
            streams=streams,
            stop_ids=frozenset() if chat.ignore_eos else self._tokenizer.eos_token_ids,
            priority=chat.priority,
            min_p=chat.min_p,
            num_top=chat.top_logprobs or 0,
            change=logit_change(chat, model.vocab_size),
            response_format=chat.response_format,
            tells_routing=chat.return_routed_experts,
            scores_prompt=chat.return_prompt_logprobs,
            policy_logprobs=chat.policy_logprobs,
        )
        seed = chat.seed if chat.seed is not None else rng.key(self._options.seed, "request", number)
        stops = chat.stop_strings
        add_samples(
            work,
            chat,
            seed=seed,
            new_text=lambda: TextWindow(self._tokenizer.detokenizer(), stops) if stops or streams else None,
            vocab_size=model.vocab_size,
        )
        return work

    async def _encoded(self, chat: ChatCompletionRequest, model: ServedModel) -> list[int]:
        """Tokenise the prompt on a separate thread: a long text takes seconds and would block the event loop."""
        refuse_oversized(chat.messages or [], offered_tools(chat), chat.prompt or "", model)
        if chat.continue_token_ids:
            check_token_ids(chat.continue_token_ids, model, "continue_token_ids")
        try:
            return await self._events.run_in_executor(self._encoder, self._tokenizer.encode_request, chat)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise EngineStopped(_CLOSING) from None  # `close` has cancelled the queued tokenisation
        except TemplateNameError as error:
            raise InvalidRequest(str(error), param="chat_template_kwargs") from error
        except UnshownFieldError as error:
            raise InvalidRequest(str(error), param=error.place) from error
        except PipelineError as error:
            raise InvalidRequest(str(error), param="prompt" if chat.prompt else "messages") from error

    def _writer(self, chat: ChatCompletionRequest, work: Request) -> ResponseWriter:
        return ResponseWriter(chat, work, model=self._options.model_id, tokenizer=self._tokenizer)

    def _submit(self, work: Request, waiter: Callable[[Delivery], None]) -> None:
        self._waiters[work.request_id] = (work, waiter)
        try:
            self._loop.submit(work)
        except ContractError:
            del self._waiters[work.request_id]
            raise

    def _forget(self, work: Request) -> None:
        if self._waiters.pop(work.request_id, None) is not None:
            self._loop.cancel(work)

    def _deliver_from_thread(self, deliveries: list[Delivery]) -> None:
        tell(self._events, self._deliver, deliveries)

    def _deliver(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            request_id = delivery.request.request_id
            known = self._waiters.pop(request_id, None) if delivery.is_last else self._waiters.get(request_id)
            if known is not None:
                known[1](delivery)

    # --- weights: the contract's two methods, and those of `WeightTarget` ------------------------------------------

    async def init_process_group(self, request: InitProcessGroupRequest) -> ProcessGroupStatus:
        self._started()
        return await self._receiver.init_process_group(request)

    async def request_weight_update(self, request: WeightUpdateRequest) -> WeightUpdateResponse:
        self._started()
        return await self._receiver.request_weight_update(request)

    @property
    def layout(self) -> WeightLayout:
        return self._started().layout

    def staging(self) -> Any:
        return self._started().staging()

    def finish_staging(self) -> None:
        self._started().finish_staging()

    async def commit(self, *, version: int, epoch: int, on_update: OnUpdate) -> float:
        """Serve the staged weights from the next step on; return the pause in seconds."""
        return await asyncio.wrap_future(self._loop.commit(version=version, epoch=epoch, on_update=on_update))

    def serving(self) -> tuple[int, int]:
        return self._loop.serving

    # --- state ---------------------------------------------------------------------------------------------------

    def model_card(self) -> ModelCard:
        model = self._started()
        epoch, version = self._loop.serving
        return ModelCard(
            id=self._options.model_id,
            model_version=version,
            epoch=epoch,
            context_length=model.context_length,
            layout=model.layout,
            layout_id=model.layout.layout_id,
            converts=converted_by(model.layout),
            digest=self._receiver.digest,
        )

    def health(self) -> Health:
        state = EngineState.READY if self._receiver.dirty is None else EngineState.DIRTY
        if self._model is None or not self._loop.is_alive:
            state = EngineState.STOPPED
        epoch, version = self._loop.serving
        return Health(state=state, model_version=version, epoch=epoch, continuation=self._continuation)

    def metrics(self) -> EngineMetrics:
        model, totals, updates = self._started(), self._loop.totals, self._receiver.totals
        room = model.room
        epoch, version = self._loop.serving
        return EngineMetrics(
            running_sequences=self._loop.num_running,
            waiting_sequences=self._loop.num_waiting,
            slots=model.slots,
            generated_tokens_total=totals.generated_tokens,
            prompt_tokens_total=totals.prompt_tokens,
            finished_sequences_total=totals.finished_sequences,
            aborted_sequences_total=totals.aborted_sequences,
            decode_steps_total=totals.decode_steps,
            occupied_slot_steps_total=totals.occupied_slot_steps,
            busy_s_total=totals.busy_s,
            weight_updates_total=updates.updates,
            weight_update_failures_total=updates.failures,
            last_update_pause_s=updates.last_pause_s,
            last_update_receive_s=updates.last_receive_s,
            weight_bytes=model.layout.num_bytes,
            cache_bytes=model.cache_bytes,
            cache_used_share=0.0 if room is None else 1 - room.free / room.blocks,
            reused_prompt_tokens_total=0 if room is None else room.reused_tokens,
            preemptions_total=totals.preemptions,
            model_version=version,
            epoch=epoch,
        )

    def _started(self) -> ServedModel:
        if self._model is None:
            raise EngineStopped("the engine has not been started")
        return self._model


# --- checks of a request against the model ----------------------------------------------------------------------------
#
# These checks run before a request is queued. An admitted request has room for at least one token. The prefix of an
# answer that another engine began must be unfinished: it has no token that ends a sample, no stop string, and fewer
# tokens than the limit. The noise of sample i depends only on (seed, i).

#: Upper bound on a prompt's average number of characters per token; longer tokens are rare, and consist of spaces or
#: dashes.
_LONGEST_TOKEN: Final = 128


def check_model(chat: ChatCompletionRequest, model_id: str) -> None:
    """Raise `UnknownModel` unless the request names `model_id`, the last path component of `model_id`, or no model."""
    if chat.model is None or chat.model == model_id:
        return
    short = model_id.rstrip("/").rpartition("/")[2]
    if chat.model != short:
        also = "" if short == model_id else f", {short!r} in short"
        raise UnknownModel(f"this engine serves {model_id!r}{also}, got {chat.model!r}", param="model")


def logit_change(chat: ChatCompletionRequest, vocab_size: int) -> LogitChange | None:
    """Return the request's change to logits, or None. Raises `InvalidRequest` for a bias on an unknown token."""
    bias = chat.logit_bias or {}
    if not bias and chat.frequency_penalty == 0 and chat.presence_penalty == 0:
        return None
    if bias and (min(bias) < 0 or max(bias) >= vocab_size):
        wrong = min(bias) if min(bias) < 0 else max(bias)
        raise InvalidRequest(f"logit_bias: token ids must be in [0, {vocab_size}), got {wrong}", param="logit_bias")
    return LogitChange(bias, chat.frequency_penalty, chat.presence_penalty)


def refuse_oversized(
    messages: Sequence[ChatMessage], tools: Sequence[ToolDefinition], text: str, model: ServedModel
) -> None:
    """Raise `ContextExceeded`, before tokenising, for a prompt with too many characters or messages to fit."""
    most = model.context_length * _LONGEST_TOKEN
    length = len(text) + sum(len(tool.model_dump_json(exclude_none=True)) for tool in tools)
    for message in messages:
        length += len(message.content) + len(message.reasoning_content or "")
        length += sum(len(call.function.name) + len(call.function.arguments) for call in message.tool_calls or ())
    if length > most or len(messages) > model.context_length:
        raise ContextExceeded(
            f"the prompt must leave room for a token in the context of {model.context_length} tokens, it has "
            f"{len(messages)} messages of {length} characters; shorten it",
            param="prompt" if text else "messages",
        )


def room_after(prompt: list[int], model: ServedModel, param: str) -> int:
    """Return the number of tokens that may follow `prompt`; raise if there is no room, or if the prompt is empty."""
    room = model.context_length - len(prompt)
    if not prompt:
        raise InvalidRequest("the prompt must have at least one token, got none", param=param)
    if room < 1:
        raise ContextExceeded(
            f"the prompt must leave room for a token in the context of {model.context_length} tokens, it has "
            f"{len(prompt)}; shorten it",
            param=param,
        )
    check_token_ids(prompt, model, param)
    return room


def check_token_ids(token_ids: Sequence[int], model: ServedModel, param: str) -> None:
    """Raise `InvalidRequest` if one of `token_ids`, which must not be empty, is outside the model's vocabulary."""
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0 or highest >= model.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise InvalidRequest(f"token ids must be in [0, {model.vocab_size}), got {wrong}", param=param)


def add_samples(
    work: Request, chat: ChatCompletionRequest, *, seed: int, new_text: Callable[[], TextWindow | None], vocab_size: int
) -> None:
    """Add a sequence per sample or prefix to `work`. Raises `InvalidRequest` for a complete or unknown prefix."""
    if chat.prefixes is None:
        for key in rng.sample_keys(seed, chat.n).tolist():
            work.add_sequence(key, new_text())
        return
    keys = rng.sample_keys(seed, chat.prefixes[-1].index + 1).tolist()
    for place, prefix in enumerate(chat.prefixes):
        text = new_text()
        ended = _end_of(prefix, work, text=text, vocab_size=vocab_size)
        if ended:
            raise InvalidRequest(
                f"the prefix of sample {prefix.index} must be unfinished, it {ended}",
                param=f"prefixes.{place}.token_ids",
            )
        work.add_sequence(keys[prefix.index], text, prefix=prefix)


def _end_of(prefix: AnswerPrefix, work: Request, *, text: TextWindow | None, vocab_size: int) -> str:
    """Push `prefix` into the window `text`; return the reason why no token can follow it, or "" if one can."""
    token_ids = prefix.token_ids
    if len(token_ids) >= work.token_limit:
        return f"has {len(token_ids)} tokens of at most {work.token_limit}"
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        return f"has a token outside [0, {vocab_size})"
    if not work.stop_ids.isdisjoint(token_ids):
        return "has a token that ends a sample"
    if text is not None and any(text.push(token_id) for token_id in token_ids):
        return "has a stop string"
    return ""
