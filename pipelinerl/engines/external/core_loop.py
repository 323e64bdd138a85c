"""`CoreLoop`: a `SampleLoop` whose samples are made by an `EngineCore`, a process of its own.

    BatchingEngine ── Request ──▶ this thread ── one core request per sample ──▶ core: schedule, step, sample
          ▲                           │  ▲                                        │
          └──────── Delivery ─────────┘  └───── tokens, log-probs, their version ─┘

An update happens between two steps: pause, load and name the new version, resume. The core says of each token which
weights sampled it, so none can be named after weights that did not. Since this thread takes every output that has come
before it goes on with a commit, what vLLM's core has sampled with the old version is counted when the commit is
answered; over HTTP, where a token may still be on its way, as good as always.

| waits for | unblocked by | or, at the latest |
|---|---|---|
| outputs | a step; the core's death, which its client notices | `stop` |
| a pause | the end of the step that runs; with `drain` the token limits of the samples that run | `stop` |
| a load in the workers | the workers | the core's death |
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, final

from inference_contract.errors import ContractError, Dirty, EngineStopped, InvalidRequest, UpdateInProgress
from inference_contract.schemas import FinishReason
from inference_contract.weights import OnUpdate
from pipelinerl.engines.batching.sample_loop import (
    UNTRAINED,
    Delivery,
    LoopTotals,
    SampledToken,
    ServedModel,
    aborted,
    deliveries,
    sampled,
)
from pipelinerl.engines.batching.scheduler import Capacity
from pipelinerl.engines.batching.sequence import Request, Sequence, extend
from pipelinerl.engines.external.engine_core import CoreModel, EngineCore, Sampled, Step, label_of, sample_id


@final
class CoreLoop:
    """One engine core and the thread that speaks to it.

    Args:
        start_core: starts the core and says what it serves; awaited on the thread.
        capacity: how many samples the core works on at once, and how many more may wait in it.
        deliver: takes what one step brought to the engine; called on the thread, must not block.
        serving: (epoch, version) of the weights that the core loads.
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
        self._requests: dict[str, Request] = {}  # accepted and not answered, whatever became of their samples
        self._num_open = 0  # their samples that have not ended
        self._stopping = False
        self._commit: Future[float] | None = None
        self._open: dict[str, Sequence] = {}  # the samples that the core works on; of the thread
        self._counted_at = 0.0  # until when `totals.busy_s` is counted; of the thread
        self._sending: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()  # of whoever pauses the core
        self._core: EngineCore
        self._events: asyncio.AbstractEventLoop
        self._stepping: asyncio.Task[None] | None = None  # takes the core's steps; None before and after that
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)

    # --- called from the engine's event loop ---------------------------------------------------------------------

    def start(self) -> Future[ServedModel]:
        """Start the thread; the future is done when the core has loaded the model, and cannot be cancelled."""
        self._ready.set_running_or_notify_cancel()
        self._thread.start()
        return self._ready

    def stop(self, timeout_s: float) -> bool:
        """End the core and the thread. Returns whether they have ended in time. Stopping twice is a no-op."""
        with self._guard:
            self._stopping = True
            if self._stepping is not None:  # so its event loop is open: `_end`, which takes the guard, comes before
                self._events.call_soon_threadsafe(self._interrupt)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Returns whether the core runs, and will go on."""
        return self._thread.is_alive() and not self._stopping

    @property
    def num_running(self) -> int:
        """Samples that the core works on, as far as it has slots."""
        return min(self._num_open, self._capacity.running)

    @property
    def num_waiting(self) -> int:
        """Samples beyond the core's slots."""
        return max(self._num_open - self._capacity.running, 0)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises `InvalidRequest`, `Overloaded`, `EngineStopped`, or what the core refuses it with."""
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
        """Nobody waits for `request` any more: its samples end. Nothing is delivered."""
        with self._guard:
            if self.is_alive:
                self._events.call_soon_threadsafe(self._withdraw, request)

    def commit(self, *, version: int, epoch: int, on_update: OnUpdate) -> Future[float]:
        """Serve the staged weights from the next step on; the future carries the pause in seconds.

        Raises:
            EngineStopped; UpdateInProgress, when another commit still waits for running samples to end.
        """
        with self._guard:
            if not self.is_alive:
                raise EngineStopped("the engine is closing; the old weights served last")
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
        finally:  # also when the core has died, which threading's excepthook reports
            self._end()

    async def _serve(self) -> None:
        self._events = asyncio.get_running_loop()
        try:
            self._core, model = await self._start_core()
        except BaseException as error:  # handed to whoever waits for `start`, whatever it is
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
            pass  # `stop`
        finally:
            self._end()  # now: to close what is half dead takes long
            await self._core.close()

    def _interrupt(self) -> None:
        """Wake the task that waits for a step; once it closes the core, it is left alone: half closed, a core leaks."""
        if self._stepping is not None:
            self._stepping.cancel()

    def _end(self) -> None:
        with self._guard:
            self._stopping = True
            self._stepping = None
            requests, self._requests, self._num_open = list(self._requests.values()), {}, 0
            commit = self._commit
        if commit is not None:  # here, and not by its task: the event loop may close before that has had a turn
            with suppress(InvalidStateError):  # it has been answered, or nobody waits for it
                commit.set_exception(EngineStopped("the engine closed before the swap was done"))
        stopped = EngineStopped("the engine closed while it worked on this request; send it to another one")
        if requests:
            self._deliver([Delivery(request, is_last=True, error=stopped) for request in requests])

    def _send(self, work: Coroutine[Any, Any, None]) -> None:
        """Ask something of the core without waiting for its answer."""
        task = self._events.create_task(work)
        self._sending.add(task)
        task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        if not task.cancelled():
            task.exception()  # that the core has died, which whoever takes its outputs learns as well

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
        """Never while the core is paused for an update: what begins after it is all of one version."""
        async with self._turn:
            begun = [sequence for sequence in request.sequences if sample_id(sequence) in self._open]
            # No prompt is read from a cache that older weights have filled, but that of a sample which still waits
            # in the core when an update comes: its siblings' is named by the weights that it was begun with.
            salt = label_of(*self.serving)
            try:
                await self._core.add(begun, salt=salt)
            except ValueError as error:  # of a value that `check` lets through
                self._refuse(request, InvalidRequest(f"the engine's core refuses the request: {error}"))

    def _refuse(self, request: Request, error: ContractError) -> None:
        self._withdraw(request)
        self._deliver([Delivery(request, is_last=True, error=error)])

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
        """Book a step's outputs and deliver them."""
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
        if surplus:  # a stop string ended it, of which the core knows nothing
            self._send(self._core.abort(surplus))
        results = deliveries(streamed, finished)
        if results:
            self._deliver(results)

    def _extended(
        self, sequence: Sequence, sample: Sampled, serving: tuple[int, int]
    ) -> list[tuple[Request, SampledToken]]:
        """Append what a step sampled, and end the sample if it has ended; what there is to stream of it."""
        new_tokens = []
        if sample.token_ids:
            epoch, version = serving
            sequence.mark_version(version)
            if not any(each.token_ids for each in sequence.request.sequences):
                sequence.request.epoch = epoch  # of whichever sample is the first; a later one may be of a later epoch
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
        if answer.done():  # the core has died before this turn, or nobody waits any more
            return
        task = self._events.create_task(swap())

        def swapped(task: asyncio.Task[float]) -> None:
            with suppress(InvalidStateError):  # `_end` has answered, or nobody waits any more
                if task.cancelled():
                    answer.cancel()
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
        async with self._turn:
            return await self._swap_paused(version=version, epoch=epoch, on_update=on_update)

    async def _swap_paused(self, *, version: int, epoch: int, on_update: OnUpdate) -> float:
        core, served, began = self._core, False, time.perf_counter()
        try:
            await core.pause(on_update)
            began = time.perf_counter()  # until now the step in hand went on, or with `drain` many
            await core.load_staged(epoch, version)
            if on_update is OnUpdate.RECOMPUTE_KV:
                await core.forget_cache()
            self.serving = (epoch, version)
            await core.resume()
            served = True
        except asyncio.CancelledError:
            raise EngineStopped("the engine closed before the swap; the old weights served") from None
        finally:
            if not served and not self._stopping:
                self._fail(Dirty(f"the swap to {epoch}.{version} broke off; publish a full update to mend it"))
        return time.perf_counter() - began

    def _fail(self, error: ContractError) -> None:
        """End every sample: nobody knows which weights would go on with it."""
        ids = list(self._open)
        self._open.clear()
        with self._guard:
            requests, self._requests, self._num_open = list(self._requests.values()), {}, 0
        self.totals.aborted_sequences += len(ids)
        if ids:
            self._send(self._core.abort(ids))
        if requests:
            self._deliver([Delivery(request, is_last=True, error=error) for request in requests])
