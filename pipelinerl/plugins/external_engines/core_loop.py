"""`CoreLoop`: a `SampleLoop` over an `EngineCore`, which does its own batching in another process.

    BatchingEngine ── Request ──▶ this thread ── one core request per sample ──▶ core: schedule, step, sample
          ▲                           │  ▲                                        │
          └──────── Delivery ─────────┘  └───── tokens, log-probs, their version ─┘

An `EngineCore` is vLLM's core, or a separate server. An update happens between two steps: pause, load and name the new
version, resume. The core reports, possibly late, which weights sampled each token, so no token is attributed to the
wrong weights.

This thread processes every output that has arrived before it continues with a commit. With vLLM's core, all tokens of
the old version have therefore been counted when the commit is answered. With a server over HTTP this is almost always
true, but a token may still be on its way.

| waits for | unblocked by | or, at the latest |
|---|---|---|
| outputs | a step; the core's death, which its client notices | `stop` |
| a pause | the end of the current step; with `drain` the token limits of the running samples | `stop` |
| a load in the workers | the workers | the core's death |
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence as Items
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

from inference_contract.errors import ContractError, Dirty, EngineStopped, InvalidRequest, UpdateInProgress
from inference_contract.schemas import FinishReason
from inference_contract.weights import OnUpdate, WeightLayout
from pipelinerl.engines.batching.model_runner import Capacity
from pipelinerl.engines.batching.sample_loop import UNTRAINED, LoopTotals, ServedModel
from pipelinerl.engines.batching.sequence import (
    Delivery,
    Request,
    SampledToken,
    Sequence,
    TopTokens,
    aborted,
    deliveries,
    extend,
    sampled,
)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The results of one step for one sample.

    Attributes:
        token_ids, logprobs: the sample's new tokens and their log-probs, all sampled by the same version of the
            weights.
        arrived: the number of tokens that the core has sampled since the last step. It differs from the length of
            `token_ids` if tokens are held back until it is known which version sampled them.
        top: for each of `token_ids` the likeliest tokens at its position, at least as many as the request wants.
        ended: True if the core stops sampling this sample, for any reason.
    """

    sample_id: str
    token_ids: Items[int]
    logprobs: Items[float]
    arrived: int
    ended: bool
    top: Items[TopTokens] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """The results of one step; `serving` is the (epoch, version) of its weights, or None for a step without tokens."""

    serving: tuple[int, int] | None
    samples: list[Sampled]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreModel:
    """The model that a core serves; satisfies `ServedModel`. The core reads the staged weights directly."""

    slots: int
    context_length: int
    vocab_size: int
    layout: WeightLayout
    cache_bytes: int
    staged: Any
    #: A core manages its cache itself, and reports neither routing nor the log-probs of given tokens.
    room: ClassVar[None] = None
    route_log: ClassVar[None] = None
    scorer: ClassVar[None] = None

    def staging(self) -> Any:
        """Return the staging buffer: u8 [layout.num_bytes], a torch tensor on the host."""
        return self.staged

    def finish_staging(self) -> None:
        """Do nothing: the core stages the bytes itself, see `EngineCore.stage`."""


class EngineCore(Protocol):
    """A running core: another process that batches and samples. Used only from the event loop that started it.

    A rejection fails one request; any other error ends the engine.
    """

    def check(self, request: Request) -> None:
        """Raise `InvalidRequest` if this core cannot serve the request; any thread may call this."""
        ...

    async def add(self, sequences: list[Sequence], *, salt: str) -> None:
        """Begin one request's samples; equal prompts with equal `salt` share a cache. A rejection is a `ValueError`."""
        ...

    async def abort(self, sample_ids: list[str]) -> None:
        """End these samples and free their memory; they produce no more output."""
        ...

    async def next_step(self) -> Step:
        """Return the next step's results. If they have already arrived, return without yielding to the event loop."""
        ...

    async def pause(self, on_update: OnUpdate) -> None:
        """Stop between two steps; `on_update` decides if running samples are kept, aborted or awaited first."""
        ...

    async def resume(self) -> None:
        """Resume sampling after a pause."""
        ...

    async def stage(self) -> None:
        """Copy the staged weights to the GPU if they fit, to make `load_staged` fast; the core samples meanwhile."""
        ...

    async def load_staged(self, epoch: int, version: int) -> None:
        """Load the staged weights, which sample from the next step on; the core must be paused."""
        ...

    async def forget_cache(self) -> None:
        """Drop the cache of keys and values; when the core resumes, it recomputes prompts and sampled tokens."""
        ...

    async def close(self) -> None:
        """End the core, or detach from it if this project did not start it."""
        ...


def refuse_beyond(request: Request, offered: frozenset[str], engine: str) -> None:
    """Raise `InvalidRequest` for a field outside `offered`; `policy_logprobs` matter only if the request truncates."""
    change = request.change
    used = {
        "min_p": request.min_p > 0,
        "top_logprobs": request.num_top > 0,
        "logit_bias": change is not None and bool(change.bias),
        "frequency_penalty": change is not None and change.frequency_penalty != 0,
        "presence_penalty": change is not None and change.presence_penalty != 0,
        "response_format": request.response_format is not None,
    }
    if request.policy_logprobs and request.truncates and "policy_logprobs" not in offered:
        raise InvalidRequest(
            f"policy_logprobs: {engine} reports log-probs after top_p, top_k and min_p; leave out these fields, or "
            "policy_logprobs",
            param="policy_logprobs",
        )
    for name, is_used in used.items():
        if is_used and name not in offered:
            raise InvalidRequest(f"{name}: {engine} does not offer it; leave it out", param=name)


def sample_id(sequence: Sequence) -> str:
    """Return a sample's id in the core: the request's id and the sample's index."""
    return f"{sequence.request.request_id}-{sequence.index}"


def label_of(epoch: int, version: int) -> str:
    """Return a version's label, `epoch.version`, for cores that name versions by text."""
    return f"{epoch}.{version}"


def named_by(label: str) -> tuple[int, int]:
    """Parse a label that `label_of` made into (epoch, version). Raises `ValueError` for any other text."""
    epoch, _, version = label.partition(".")
    return int(epoch), int(version)


class CoreLoop:
    """One engine core and the thread that drives it; satisfies `SampleLoop`.

    Args:
        start_core: starts the core and returns it with the model it serves; awaited on the thread.
        capacity: the number of samples that the core works on at once, and the number that may wait in addition.
        deliver: hands one step's results to the engine; called on the thread, must not block.
        serving: (epoch, version) of the weights with which the core starts.
    """

    def __init__(
        self,
        *,
        start_core: Callable[[], Awaitable[tuple[EngineCore, CoreModel]]],
        capacity: Capacity,
        deliver: Callable[[list[Delivery]], None],
        serving: tuple[int, int] = UNTRAINED,
    ) -> None:
        self.totals = LoopTotals()
        self.serving = serving
        self._start_core = start_core
        self._capacity = capacity
        self._deliver = deliver
        self._ready: Future[ServedModel] = Future()
        self._guard = threading.Lock()
        self._requests: dict[str, Request] = {}  # accepted requests that are not answered yet
        self._num_open = 0  # number of unfinished samples of `_requests`
        self._stopping = False
        self._commit: Future[float] | None = None
        self._open: dict[str, Sequence] = {}  # samples in the core; used only by the thread
        self._counted_at = 0.0  # the time up to which `totals.busy_s` is counted; used only by the thread
        self._sending: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()  # lock held while samples are added, and while the core is paused
        self._core: EngineCore
        self._events: asyncio.AbstractEventLoop
        self._stepping: asyncio.Task[None] | None = None  # the task that waits for the core's next step
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)

    # --- called from the engine's event loop ---------------------------------------------------------------------

    def start(self) -> Future[ServedModel]:
        """Start the thread; the future completes when the core has loaded the model, and cannot be cancelled."""
        self._ready.set_running_or_notify_cancel()
        self._thread.start()
        return self._ready

    def stop(self, timeout_s: float) -> bool:
        """End the core and the thread; return whether they ended in time. Stopping twice is a no-op."""
        with self._guard:
            self._stopping = True
            # `_end` clears `_stepping` before the event loop closes, so the loop is open here
            if self._stepping is not None:
                self._events.call_soon_threadsafe(self._interrupt)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @property
    def num_running(self) -> int:
        """The number of samples that the core works on at once, limited by the core's `capacity`."""
        return min(self._num_open, self._capacity.running)

    @property
    def num_waiting(self) -> int:
        """The number of samples that wait because the core already works on as many as it may."""
        return max(self._num_open - self._capacity.running, 0)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises `InvalidRequest`, `Overloaded`, `EngineStopped`, or the core's own rejection."""
        samples = len(request.sequences)
        with self._guard:
            if not self.is_alive:
                raise EngineStopped("the engine is closing; send the request to another one")
            self._capacity.check(samples, running=self.num_running, waiting=self.num_waiting)
            self._core.check(request)
            self._requests[request.request_id] = request
            self._num_open += samples
            self._events.call_soon_threadsafe(self._admit, request)

    def cancel(self, request: Request) -> None:
        """Abandon `request`: its samples end, and nothing more is delivered."""
        with self._guard:
            if self.is_alive:
                self._events.call_soon_threadsafe(self._withdraw, request)

    def commit(self, *, version: int, epoch: int, on_update: OnUpdate) -> Future[float]:
        with self._guard:
            if not self.is_alive:
                raise EngineStopped("the engine is closing, without a swap to the new weights")
            if self._commit is not None and not self._commit.done():
                raise UpdateInProgress("another swap still waits for running samples to end")
            self._commit = answer = Future[float]()
            swap = partial(self._swap, version=version, epoch=epoch, on_update=on_update)
            self._events.call_soon_threadsafe(self._begin_swap, answer, swap)
            return answer

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:  # this also runs after the core's death, which threading's excepthook reports
            self._end()

    async def _serve(self) -> None:
        self._events = asyncio.get_running_loop()
        try:
            self._core, model = await self._start_core()
        except BaseException as error:  # pass any exception to the caller that waits for `start`
            self._end()
            self._ready.set_exception(error)
            return
        with self._guard:
            self._stepping = asyncio.current_task()
        self._ready.set_result(model)
        try:
            while not self._stopping:
                self._take(await self._core.next_step())
        except asyncio.CancelledError:
            pass  # `stop` cancels this task
        finally:
            self._end()  # answer the callers first, since closing a broken core takes long
            await self._core.close()

    def _interrupt(self) -> None:
        """Cancel the task that waits for a step, unless it is already closing the core, which must finish."""
        if self._stepping is not None:
            self._stepping.cancel()

    def _end(self) -> None:
        with self._guard:
            self._stopping = True
            self._stepping = None
            requests, self._requests, self._num_open = list(self._requests.values()), {}, 0
            commit = self._commit
        if commit is not None:  # fail the commit here, since the task that performs it may never run
            with suppress(InvalidStateError):  # the commit's future may already have a result or be cancelled
                commit.set_exception(EngineStopped("the engine closed before the swap was done"))
        stopped = EngineStopped("the engine closed during this request; send it to another engine")
        if requests:
            self._deliver([Delivery(request, is_last=True, error=stopped) for request in requests])

    def _send(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._events.create_task(work)
        self._sending.add(task)
        task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        if not task.cancelled():
            task.exception()  # mark the exception as retrieved; `next_step` reports a dead core

    # --- samples -------------------------------------------------------------------------------------------------

    def _admit(self, request: Request) -> None:
        request.epoch, version = self.serving
        self.totals.prompt_tokens += len(request.prompt_token_ids)
        if not self._open:
            self._counted_at = time.perf_counter()
        for sequence in request.sequences:
            self.totals.prompt_tokens += len(sequence.prefix)
            sequence.mark_version(version)
            self._open[sample_id(sequence)] = sequence
        self._send(self._begin(request))

    async def _begin(self, request: Request) -> None:
        """Begin a request's samples once the core is not paused, so that all begin with the same, known version."""
        async with self._turn:
            begun = [sequence for sequence in request.sequences if sample_id(sequence) in self._open]
            # The salt keeps prompts from reusing a cache that older weights filled. The exception is a sample that
            # waits in the core during an update: it keeps its salt, and therefore uses the cache of its siblings.
            salt = label_of(*self.serving)
            try:
                await self._core.add(begun, salt=salt)
            except ValueError as error:  # the core has rejected a value that `check` accepted
                self._withdraw(request)
                rejection = InvalidRequest(f"the engine's core rejects the request: {error}")
                self._deliver([Delivery(request, is_last=True, error=rejection)])

    def _withdraw(self, request: Request) -> None:
        ids = [
            sample_id(sequence)
            for sequence in request.sequences
            if self._open.pop(sample_id(sequence), None) is not None
        ]
        self.totals.aborted_sequences += len(ids)
        request.unfinished = 0
        self._close([request], samples=len(ids))
        if ids:
            self._send(self._core.abort(ids))

    def _close(self, requests: Iterable[Request], *, samples: int) -> None:
        with self._guard:
            self._num_open -= samples
            for request in requests:
                self._requests.pop(request.request_id, None)

    def _take(self, step: Step) -> None:
        streamed: list[tuple[Request, SampledToken]] = []
        finished: list[Request] = []
        ended: list[str] = []
        surplus: list[str] = []
        known = [(self._open[sample.sample_id], sample) for sample in step.samples if sample.sample_id in self._open]
        if known:
            before, self._counted_at = self._counted_at, time.perf_counter()
            self.totals.busy_s += self._counted_at - before
        for sequence, sample in known:
            request = sequence.request
            self.totals.generated_tokens += sample.arrived
            new_tokens = self._extended(sequence, sample, step.serving or self.serving)
            if request.streams:
                streamed += new_tokens
            if sequence.finish_reason is None:
                continue
            del self._open[sample.sample_id]
            ended.append(sample.sample_id)
            if not sample.ended:
                surplus.append(sample.sample_id)
            request.unfinished -= 1
            if request.unfinished == 0:
                finished.append(request)
        sampling = sum(1 for sample in step.samples if sample.arrived)
        self.totals.decode_steps += sampling > 0
        self.totals.occupied_slot_steps += sampling
        self._close(finished, samples=len(ended))
        if surplus:  # the core does not know stop strings, so it still samples these choices
            self._send(self._core.abort(surplus))
        results = deliveries(streamed, finished)
        if results:
            self._deliver(results)

    def _extended(
        self, sequence: Sequence, sample: Sampled, serving: tuple[int, int]
    ) -> list[tuple[Request, SampledToken]]:
        new_tokens = []
        if sample.token_ids:
            epoch, version = serving
            sequence.mark_version(version)
            if not any(each.token_ids for each in sequence.request.sequences):
                # The epoch of the request's first token; later tokens may have a later epoch.
                sequence.request.epoch = epoch
        num_top = sequence.request.num_top
        for place, (token_id, logprob) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
            if num_top:
                sequence.top.append(sample.top[place][:num_top])
            ended = extend([sequence], [token_id], [logprob])
            if sequence.request.streams:
                new_tokens.append(sampled(sequence))
            if ended:
                self.totals.finished_sequences += 1
                return new_tokens
        if sample.ended:
            sequence.finish_reason = FinishReason.ABORT
            self.totals.aborted_sequences += 1
            new_tokens.append(aborted(sequence))
        return new_tokens

    # --- weights -------------------------------------------------------------------------------------------------

    def _begin_swap(self, answer: Future[float], swap: Callable[[], Coroutine[Any, Any, float]]) -> None:
        if answer.done():  # the core has died or the caller has cancelled
            return
        task = self._events.create_task(swap())

        def swapped(task: asyncio.Task[float]) -> None:
            with suppress(InvalidStateError):  # `_end` or a cancellation may have completed the future
                if task.cancelled():
                    answer.set_exception(EngineStopped("the engine closed before the swap to the new weights"))
                elif error := task.exception():
                    answer.set_exception(error)
                else:
                    answer.set_result(task.result())

        def unwanted(answer: Future[float]) -> None:
            with self._guard:
                if answer.cancelled() and self.is_alive:
                    self._events.call_soon_threadsafe(task.cancel)

        task.add_done_callback(swapped)
        answer.add_done_callback(unwanted)

    async def _swap(self, *, version: int, epoch: int, on_update: OnUpdate) -> float:
        core, served = self._core, False
        await core.stage()
        async with self._turn:
            try:
                await core.pause(on_update)
                began = time.perf_counter()  # measure the pause from here, after the last step has ended
                await core.load_staged(epoch, version)
                if on_update is OnUpdate.RECOMPUTE_KV:
                    await core.forget_cache()
                self.serving = (epoch, version)
                await core.resume()
                served = True
            finally:
                if not served and not self._stopping:
                    self._fail(
                        Dirty(f"the swap to {epoch}.{version} failed midway; publish a full update to repair it")
                    )
            return time.perf_counter() - began

    def _fail(self, error: ContractError) -> None:
        """End every sample with `error`: after a failed swap, the weights of further tokens would be unknown."""
        ids = list(self._open)
        self._open.clear()
        with self._guard:
            requests, self._requests, self._num_open = list(self._requests.values()), {}, 0
        self.totals.aborted_sequences += len(ids)
        if ids:
            self._send(self._core.abort(ids))
        if requests:
            self._deliver([Delivery(request, is_last=True, error=error) for request in requests])
