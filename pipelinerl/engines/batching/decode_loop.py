"""`DecodeLoop`: the thread that owns the model. It admits, decodes, retires and swaps weights, and never busy-waits.

    ┌─▶ drop cancelled ─▶ commit new weights, if due ─▶ admit and prefill ─▶ decode one token per row ─▶ deliver ─┐
    └─────────────────────────────────────────────────────────────────────────────────────────────────────────────┘

| waits for | unblocked by |
|---|---|
| work, when there is none | `submit`, `commit`, `stop` |
| the rows to empty, before a `drain` commit | each sample's token limit, as decoding continues |

A runner on a GPU starts the next step while the tokens of the last step are still being recorded and delivered
(`EarlyStep`), unless a row is known to end or to join. The loop takes the tokens of a step that was started early
before it admits requests or commits weights. `Gathering` says whether free rows wait, so that sequences join together.

The event loop calls `submit`, `cancel`, `commit` and `stop`. One lock guards the state that these calls share with the
thread; it is never held while the model runs. The thread passes all results of a step to `deliver` in one call. Every
request and every commit is answered, however the thread ends.

If logits are not finite, only their request is rejected: its token is not delivered, and its keys and values leave the
cache. If a forward pass raises an exception, only the requests that it computed fail: those of a decode step, or those
of a prefill, whose prompts may take too much memory. The thread ends if the runner cannot trust its cache any more
(`ModelRunner.survives`), or if `_MOST_FAILED` passes fail without a step that succeeds.

If a paged cache has no block for a row's next token, the sequence with the fewest tokens is preempted. It keeps its
tokens; as soon as there is room, its cache is recomputed with the serving weights.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from inference_contract.errors import EngineStopped, InvalidRequest, UpdateInProgress
from inference_contract.schemas import FinishReason
from inference_contract.weights import OnUpdate
from pipelinerl.engines.batching.model_runner import (
    Admission,
    Capacity,
    FurtherToken,
    Gathering,
    ModelRunner,
    Moves,
    Prefill,
    RowState,
    Scheduler,
)
from pipelinerl.engines.batching.sample_loop import UNTRAINED, LoopTotals, RouteLog, ServedModel
from pipelinerl.engines.batching.sequence import (
    Delivery,
    Request,
    SampledToken,
    Sequence,
    aborted,
    deliveries,
    extend,
    failed,
    refused,
    sampled,
)

log = logging.getLogger("pipelinerl")

#: Failed passes, without a decode step that succeeds in between, after which the engine ends.
_MOST_FAILED: Final = 10
_NO_STRUCTURE: Final = (
    "response_format: this engine has no structured output; leave it out, or serve the model with the vLLM engine"
)


@dataclass(slots=True)
class _Commit:
    version: int
    epoch: int
    on_update: OnUpdate
    pause_s: Future[float] = field(default_factory=Future)


class DecodeLoop:
    """Decode loop of one model on one thread; satisfies `SampleLoop`.

    Args:
        load: builds the runner; called on the thread, so that all calls to the array library come from one thread.
        max_waiting: the number of samples that may wait for a row.
        prefill_tokens: the maximum number of prompt tokens that are admitted between two steps.
        deliver: hands one step's results to the event loop; called on the thread, must not block.
    """

    def __init__(
        self,
        *,
        load: Callable[[], ModelRunner],
        max_waiting: int,
        prefill_tokens: int,
        deliver: Callable[[list[Delivery]], None],
    ) -> None:
        self.totals = LoopTotals()
        self.serving = UNTRAINED
        self.ready: Future[ServedModel] = Future()
        self._load = load
        self._max_waiting, self._prefill_tokens = max_waiting, prefill_tokens
        self._deliver = deliver
        self._changed = threading.Condition()
        self._cancelled: list[Request] = []
        self._commit: _Commit | None = None
        self._failed = 0  # forward passes that have raised since the last decode step that succeeded
        self._streams = 0
        self._routing_requests = 0  # number of open requests that return their routing
        self._stopping = False
        self._call: Callable[[], None] | None = None
        self._gathering = Gathering()
        self._scheduler: Scheduler
        self._runner: ModelRunner
        self._thread = threading.Thread(target=self._main, name="decode", daemon=True)

    def between_steps(self, call: Callable[[], None]) -> None:
        """Have `call` called once on the thread, before its next step; a later call replaces one that waits."""
        self._call = call

    # --- called from the event loop ------------------------------------------------------------------------------

    def start(self) -> Future[ServedModel]:
        """Start the thread; the future completes when the model is loaded, and cannot be cancelled."""
        self.ready.set_running_or_notify_cancel()
        self._thread.start()
        return self.ready

    def stop(self, timeout_s: float) -> bool:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @property
    def num_running(self) -> int:
        """The number of samples that are decoded now, one per row."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    def submit(self, request: Request) -> None:
        if request.response_format is not None:
            raise InvalidRequest(_NO_STRUCTURE, param="response_format")
        with self._changed:
            if not self.is_alive:
                raise EngineStopped("the engine is closing; send the request to another one")
            self._scheduler.submit(request)
            self._count(request, 1)
            self._changed.notify()

    def cancel(self, request: Request) -> None:
        """Abandon `request`: its rows are free from the next step on, and nothing more is delivered."""
        with self._changed:
            self._cancelled.append(request)
            self._changed.notify()

    def commit(self, *, version: int, epoch: int, on_update: OnUpdate) -> Future[float]:
        """Swap between two steps; return a future of the pause. Raises `EngineStopped`, `UpdateInProgress`."""
        with self._changed:
            if not self.is_alive:
                raise EngineStopped("the engine is closing, without a swap to the new weights")
            if self._commit is not None:
                raise UpdateInProgress(
                    f"the swap to {self._commit.epoch}.{self._commit.version} still waits for running samples to end"
                )
            self._commit = _Commit(version, epoch, on_update)
            # Mark the future as running, so that the caller cannot cancel it.
            self._commit.pause_s.set_running_or_notify_cancel()
            self._changed.notify()
            return self._commit.pause_s

    # --- the thread ----------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            if not self._loaded():
                return
            while self._await_work():
                began = time.perf_counter()
                call, self._call = self._call, None
                if call is not None:
                    call()
                self._drop_cancelled()
                # Rows join and weights change only after a step of the running rows that has started early.
                if not (self._runner.early_step.started and self._scheduler.running):
                    self._commit_if_due()
                    self._admit()
                if self._scheduler.running:
                    self._step()
                self.totals.busy_s += time.perf_counter() - began
        finally:  # this also runs after an exception, which threading's excepthook then reports
            self._end()

    def _loaded(self) -> bool:
        try:
            self._runner = self._load()
            capacity = Capacity(self._runner.slots, self._max_waiting)
            self._scheduler = Scheduler(capacity, self._prefill_tokens)
        except BaseException as error:  # pass any exception to the caller that waits for `ready`
            self.ready.set_exception(error)
            return False
        self.ready.set_result(self._runner)
        return True

    def _await_work(self) -> bool:
        with self._changed:
            while not (
                self._stopping
                or self._scheduler.running
                or self._scheduler.num_waiting
                or self._commit is not None
                or self._cancelled
            ):
                self._changed.wait()
            return not self._stopping

    def _drop_cancelled(self) -> None:
        if not self._cancelled:
            return
        with self._changed:
            cancelled, self._cancelled = self._cancelled, []
            rows: list[int] = []
            for request in cancelled:
                rows += self._withdrawn(request)
            moves = self._scheduler.retire(rows)
        self._free(rows, moves)

    def _withdrawn(self, request: Request) -> list[int]:
        """Count a request's unfinished samples as aborted; return the rows to retire. The caller holds the lock."""
        if not request.unfinished:
            return []
        self.totals.aborted_sequences += request.unfinished
        self._count(request, -1)
        request.unfinished = 0
        return self._scheduler.withdraw(request)

    def _admit(self) -> None:
        routes = self._runner.route_log
        if not self._gathering.may_join(len(self._scheduler.running)):
            return
        with self._changed:
            # While a commit waits for the rows to drain, only sequences that have already begun get a row.
            admissions = self._scheduler.admit(self._runner.room, new=self._commit is None)
            if routes is not None:
                routes.is_on = self._routing_requests > 0
        if not admissions:
            return
        reused, began = self._reused_tokens, time.perf_counter()
        try:
            self._fill(admissions)
        except Exception as error:  # array libraries may raise anything
            self._survive(error, [each.request for each in admissions])
            return
        given = sum(len(each.sequences[0].context) - 1 for each in admissions if each.sibling is None)
        self._gathering.count_prefill(given - (self._reused_tokens - reused), time.perf_counter() - began)

    @property
    def _reused_tokens(self) -> int:
        room = self._runner.room
        return 0 if room is None else room.reused_tokens

    def _fill(self, admissions: list[Admission]) -> None:
        """Compute the cache of the admitted rows, and place the rows in the next step."""
        routes = self._runner.route_log
        computed = [each for each in admissions if each.sibling is None]
        self._score_prompts(computed)
        # Leave out the last token of each context: the next decode step feeds it.
        prefills = [Prefill(each.sequences[0].context[:-1], each.rows) for each in computed]
        self._runner.prefill([prefill for prefill in prefills if prefill.token_ids])
        if routes is not None and routes.is_on:
            _keep_routing_of_prompts(computed, routes)
        epoch, version = self.serving
        for each in admissions:
            context = each.sequences[0].context
            if each.sibling is None:
                self.totals.prompt_tokens += len(context) - len(each.sequences[0].token_ids)
            elif len(context) > 1:
                self._runner.copy_cache(each.sibling, each.rows, len(context) - 1)
            if each.sequences[0] is each.request.sequences[0] and not each.sequences[0].token_ids:
                each.request.epoch = epoch
            for sequence in each.sequences:
                sequence.mark_version(version)
        self._runner.place([state for each in admissions for state in _row_states(each)])

    def _score_prompts(self, computed: Iterable[Admission]) -> None:
        routes, scorer = self._runner.route_log, self._runner.scorer
        for request in (each.request for each in computed):
            if scorer is None or not request.scores_prompt or request.prompt_logprobs is not None:
                continue
            was_on = routes is not None and routes.is_on
            if routes is not None:
                routes.is_on = False  # scoring is a separate forward pass, whose routing is not recorded
            request.prompt_logprobs = scorer(request.prompt_token_ids, request.temperature)
            if routes is not None:
                routes.is_on = was_on

    def _step(self) -> None:
        running = self._scheduler.running
        while not self._runner.reserve(len(running)):
            row = min(range(len(running)), key=lambda row: len(running[row].context))
            self.totals.preemptions += 1
            with self._changed:
                moves = self._scheduler.preempt(row)
            self._free([row], moves)
        early = self._runner.early_step
        early.allowed = early.is_used and self._keeps_rows()
        idle, began = self._scheduler.admissible, time.perf_counter()
        try:
            token_ids, logprobs = self._runner.decode(len(running))
        except Exception as error:  # array libraries may raise anything
            self._survive(error, [sequence.request for sequence in running])
            return
        self._gathering.count_step(time.perf_counter() - began, idle)
        self._failed = 0
        self.totals.decode_steps += 1
        self.totals.occupied_slot_steps += len(running)
        routes = self._runner.route_log
        if routes is not None and routes.is_on:  # append experts before tokens, so that no token is without experts
            for sequence, routed in zip(running, routes.decoded, strict=True):
                if sequence.request.tells_routing:
                    sequence.routed.append(routed)
        for row, top in self._runner.top_logprobs.items():
            running[row].top.append(top)
        further = [(running[row], tokens) for row, tokens in self._runner.further.items()]
        if not math.isfinite(sum(logprobs)):
            self._refuse(token_ids, logprobs)
        ended = extend(running, token_ids, logprobs)
        self.totals.generated_tokens += len(running)
        streamed = [sampled(sequence) for sequence in running if sequence.request.streams] if self._streams else []
        for sequence, tokens in further:
            if sequence in running:  # it has left if its first token was rejected
                streamed += self._extend_further(sequence, tokens)
        if further:
            ended = [row for row, sequence in enumerate(running) if sequence.finish_reason is not None]
        finished: list[Request] = []
        if ended:
            self.totals.finished_sequences += len(ended)
            finished = self._finish(ended)
        self._report(deliveries(streamed, finished))

    def _extend_further(self, sequence: Sequence, tokens: Iterable[FurtherToken]) -> list[tuple[Request, SampledToken]]:
        """Append the tokens of a sample's draft until the sample ends; return them if the sample is streamed."""
        streamed = []
        for token in tokens:
            if sequence.finish_reason is not None:
                break
            if sequence.request.tells_routing and token.routed is not None:
                sequence.routed.append(token.routed)
            if token.top is not None:
                sequence.top.append(token.top)
            extend([sequence], [token.token_id], [token.logprob])
            self.totals.generated_tokens += 1
            if sequence.request.streams:
                streamed.append(sampled(sequence))
        return streamed

    def _keeps_rows(self) -> bool:
        """Return True if, as far as can be foreseen, no row ends in the next step, and none joins after it."""
        scheduler = self._scheduler
        return not (
            self._commit is not None
            or self._cancelled
            or (scheduler.admissible and self._gathering.may_join(len(scheduler.running)))
            or any(len(sequence.token_ids) + 1 >= sequence.token_limit for sequence in scheduler.running)
        )

    def _count(self, request: Request, change: int) -> None:
        """Update the counters for a request that arrived (`change` = 1) or ended (-1). The caller holds the lock."""
        self._streams += change * request.streams
        self._routing_requests += change * request.tells_routing

    def _refuse(self, token_ids: list[int], logprobs: list[float]) -> None:
        """Fail requests with a non-finite log-prob in a row; remove their rows from `token_ids` and `logprobs`."""
        running = self._scheduler.running
        nonfinite_rows = [row for row, logprob in enumerate(logprobs) if not math.isfinite(logprob)]
        refusals = {running[row].request.request_id: refused(running[row], self.serving) for row in nonfinite_rows}
        moves = self._fail(list(refusals.values()))
        for source, target in zip(moves.sources, moves.targets, strict=True):
            token_ids[target], logprobs[target] = token_ids[source], logprobs[source]
        del token_ids[len(running) :], logprobs[len(running) :]

    def _survive(self, error: Exception, requests: Iterable[Request]) -> None:
        """Fail `requests`, whose forward pass raised `error`; raise `error` instead if the engine must end."""
        self._failed += 1
        if self._failed == _MOST_FAILED or not self._runner.survives(error):
            raise error
        log.error("a forward pass failed; its requests get an error, the engine continues", exc_info=error)
        unique = {request.request_id: request for request in requests}
        self._fail([failed(request, error) for request in unique.values()])

    def _fail(self, failures: list[Delivery]) -> Moves:
        """End requests with errors, and remove their samples from the rows and the cache; return the moves of rows."""
        requests = {each.request.request_id for each in failures}
        running = self._scheduler.running
        self._runner.clear([row for row, each in enumerate(running) if each.request.request_id in requests])
        with self._changed:
            rows = [row for each in failures for row in self._withdrawn(each.request)]
            moves = self._scheduler.retire(rows)
        self._free(rows, moves)
        self._report(failures)
        return moves

    def _finish(self, rows: list[int]) -> list[Request]:
        """Count the samples in `rows` as finished and free the rows; return requests whose last sample has ended."""
        finished = self._ended([self._scheduler.running[row] for row in rows])
        with self._changed:
            moves = self._scheduler.retire(rows)
        self._free(rows, moves)
        return finished

    def _ended(self, sequences: Iterable[Sequence]) -> list[Request]:
        finished = []
        with self._changed:
            for sequence in sequences:
                request = sequence.request
                request.unfinished -= 1
                if request.unfinished == 0:
                    finished.append(request)
                    self._count(request, -1)
        return finished

    def _report(self, step: list[Delivery]) -> None:
        if step:
            self._deliver(step)

    def _free(self, rows: Iterable[int], moves: Moves) -> None:
        self._runner.release(list(rows))
        if moves.sources:
            self._runner.move(moves.sources, moves.targets)

    # --- weights -------------------------------------------------------------------------------------------------

    def _commit_if_due(self) -> None:
        commit, running = self._commit, self._scheduler.running
        if commit is None or (commit.on_update is OnUpdate.DRAIN and (running or self._scheduler.any_preempted)):
            return
        start = time.perf_counter()
        if commit.on_update is OnUpdate.ABORT:
            self._abort_running()
        self._runner.swap()
        self.serving = (commit.epoch, commit.version)
        recomputes = commit.on_update is OnUpdate.RECOMPUTE_KV
        for sequence in running:
            sequence.mark_version(commit.version)
            sequence.prompt_cache_is_current = recomputes
        if recomputes and running:
            rows: dict[tuple[int, ...], list[int]] = {}
            for row, sequence in enumerate(running):
                rows.setdefault(tuple(sequence.context[:-1]), []).append(row)
            self._runner.prefill([Prefill(context, of) for context, of in rows.items() if context])
        with self._changed:
            self._commit = None
        commit.pause_s.set_result(time.perf_counter() - start)

    def _abort_running(self) -> None:
        with self._changed:
            waiting = self._scheduler.drop_preempted()
        running = list(self._scheduler.running)
        for sequence in (*running, *waiting):
            sequence.finish_reason = FinishReason.ABORT
        self.totals.aborted_sequences += len(running) + len(waiting)
        streamed = [aborted(sequence) for sequence in (*running, *waiting) if sequence.request.streams]
        finished = [*self._ended(waiting), *self._finish(list(range(len(running))))]
        self._report(deliveries(streamed, finished))

    def _end(self) -> None:
        with self._changed:
            self._stopping = True
            commit, self._commit = self._commit, None
            requests = self._scheduler.withdraw_all() if self.ready.exception() is None else []
            requests = [request for request in requests if request not in self._cancelled]
        if commit is not None:
            commit.pause_s.set_exception(EngineStopped("the engine closed before the swap to the new weights"))
        stopped = EngineStopped("the engine closed during this request; send it to another engine")
        if requests:
            self._deliver([Delivery(request, is_last=True, error=stopped) for request in requests])


def _keep_routing_of_prompts(computed: Iterable[Admission], routes: RouteLog) -> None:
    found = iter(routes.prefilled)
    for admission in computed:
        request = admission.request
        # A prompt of one token has no routing, because the first decode step feeds it without a prefill.
        routed = next(found) if len(admission.sequences[0].context) > 1 else routes.decoded[:0]
        if request.tells_routing and request.prompt_routed is None:
            request.prompt_routed = routed[: len(request.prompt_token_ids) - 1]


def _row_states(admission: Admission) -> Iterable[RowState]:
    request = admission.request
    for row, sequence in zip(admission.rows, admission.sequences, strict=True):
        context = sequence.context
        yield RowState(
            row=row,
            token_id=context[-1],
            position=len(context) - 1,
            noise_key=sequence.noise_key,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            num_sampled=len(sequence.prefix) + len(sequence.token_ids),
            min_p=request.min_p,
            policy_logprobs=request.policy_logprobs,
            num_top=request.num_top,
            change=request.change,
            sampled=sequence.prefix + sequence.token_ids,
        )
