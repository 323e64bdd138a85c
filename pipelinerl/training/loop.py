"""The loop around a trainer: collect a batch, step, report, apply directives; publish and checkpoint when directed.

    state       consumes              waits for                        unblocked by
    collect     rollouts, directives  enough acceptable groups         actors (new groups), knobs (k raised)
    compute     a TrainBatch          forward, backward                the backend
    apply       gradients             the current publication          engines (once they have the old weights)
    report      —                     the controller's directive       controller

A directive, the controller's answer to a report, says where to publish, whether to checkpoint or stop, and the `knobs`.
A step with a NaN or infinity is reported but not applied, and its groups are counted as filtered. The controller ends
the run after three such steps in a row.

A version is the result of one batch, by one or several optimizer steps; only whole versions are published, reported and
saved. A publication runs during the next forward and backward and ends before the next `optimizer_step`, which alone
changes weights. One worker thread makes every trainer call, so the event loop keeps reading while the trainer computes.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

from inference_contract.weights import OnUpdate
from pipelinerl.enums import NoSignal, StalenessScope, Truncated
from pipelinerl.errors import DeadlineError, DivergedError
from pipelinerl.messages import (
    SKIPS_THAT_END,
    ConsumedReport,
    Directive,
    OrdersEnded,
    Question,
    Starving,
    StepDone,
    StepSkipped,
    TrainerLeaving,
    TrainerReady,
    TrainerStopped,
)
from pipelinerl.objective.kl_control import KLController
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.reward import RewardShaping
from pipelinerl.objective.streams import ONE_LOSS, DomainLosses
from pipelinerl.staleness import StalenessBounds
from pipelinerl.streams.stream import Stream
from pipelinerl.training.canary_check import CanaryCheck
from pipelinerl.training.checkpoints.checkpoint import Capture, Checkpointing, CheckpointStore
from pipelinerl.training.checkpoints.manifest import TrainingState
from pipelinerl.training.finite_check import NonFiniteStep
from pipelinerl.training.publishing import Publishing
from pipelinerl.training.rollouts.admission import ConsumedLedger, GroupOutcome, Lineage, SolvedProblems
from pipelinerl.training.rollouts.batch import ONE_STEP, MiniBatching, TrainBatch, build, signal_of, teacher
from pipelinerl.training.rollouts.batcher import Batcher, OverdueWait, StepBudget, awaited
from pipelinerl.training.rollouts.rollout_reader import RESEND_S, Arrivals, ControllerLink, RolloutReader
from pipelinerl.training.schedule import AdaptiveObjective, LearningRateSchedule
from pipelinerl.training.step_watch import StepFigures, StepWatch
from pipelinerl.training.train_step import StepResult, TrainStep
from pipelinerl.types import RolloutGroup
from pipelinerl.weights.publisher import Publisher
from trainer_contract.types import RoutingShape

log = logging.getLogger("pipelinerl")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """Settings of a training loop.

    `deadline_s` bounds every wait of the loop, and `publish_timeout_s` a publication. A step with enough groups may
    wait up to `overdue_s` for late groups that would be too stale for the next step (None: no wait). `schedule` counts
    optimizer steps, of which a batch has several with `mini_batching`. `shaping` and `losses` are by domain. Token ids
    must be below `vocab_size`. If recorded MoE routing is replayed, `routing` has the routers' sizes.
    """

    micro_batch_tokens: int
    tokens_per_step: int | None
    no_signal: NoSignal
    deadline_s: float
    on_update: OnUpdate
    schedule: LearningRateSchedule
    shaping: Mapping[str, RewardShaping] = field(default_factory=dict)
    losses: DomainLosses = ONE_LOSS
    truncated: Truncated = Truncated.TRAIN
    kl: KLController | None = None
    vocab_size: int | None = None
    routing: RoutingShape | None = None
    publish_timeout_s: float = 120.0
    scope: StalenessScope = StalenessScope.GROUP
    overdue_s: float | None = None
    mini_batching: MiniBatching = ONE_STEP


@final
class TrainingLoop:
    """The loop that trains one policy, from the first batch until the run stops."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        step: TrainStep,
        objective: PolicyObjective,
        stream: Stream,
        publisher: Publisher,
        check_canary: CanaryCheck,
        checkpoints: CheckpointStore,
        restored: TrainingState | None,
        at: Callable[[int], None] = lambda version: None,
        watch: StepWatch | None = None,
    ) -> None:
        self._settings = settings
        self._step = step
        self._trainer = step.passes.policy
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._objective = AdaptiveObjective(
            objective,
            controller=settings.kl,
            restored=restored.kl_coefficient if restored else None,
            baselines=restored.baselines if restored else {},
        )
        self._overdue = None if settings.overdue_s is None else OverdueWait(settings.overdue_s)
        self._version, self._skipped = restored.model_version if restored else 0, 0
        self._checkpoints = checkpoints
        self._at = at
        self._watch = watch or StepWatch()
        self._solved = SolvedProblems(restored.solved if restored else None)
        self._batcher = Batcher(
            ledger=ConsumedLedger.from_record(restored.ledger) if restored else ConsumedLedger(),
            lineage=Lineage(0, 0),
            no_signal=settings.no_signal,
            teaches=teacher(objective, settings.shaping, settings.truncated, settings.losses),
            signal=signal_of(objective, settings.losses),
            vocab_size=settings.vocab_size,
            routing=settings.routing,
            ended=self._ended,
            scope=settings.scope,
        )
        self._reader = RolloutReader(
            stream, offsets=restored.offsets if restored else {}, frontier=lambda: self._batcher.ledger.frontier
        )
        self._link = ControllerLink(stream, self._reader, deadline_s=settings.deadline_s)
        self._publishing = Publishing(
            self._trainer,
            self._link,
            publisher,
            check_canary,
            worker=self._worker,
            on_update=settings.on_update,
            timeout_s=settings.publish_timeout_s,
        )
        self._checkpointing = Checkpointing(
            checkpoints, report=self._link.report, trim=self._reader.trim, deadline_s=settings.deadline_s
        )
        self._earlier = tuple((epoch, began_at) for epoch, began_at in restored.epochs) if restored else ()
        self._claimed = False
        self._saved: tuple[int, int] | None = None  # (epoch, version) of the last checkpoint that was begun
        self._leaving = False
        self._incarnation = uuid.uuid4().hex[:12]
        self._reported = ConsumedReport()

    @property
    def _current(self) -> Directive:
        return self._link.current

    def leave(self) -> None:
        """Let `run` save the state and return between two steps; actors and engines continue without this trainer."""
        self._leaving = True

    async def run(self) -> int:
        """Train until a directive stops the run, or until `leave` takes effect; return the last version.

        Raises:
            DivergedError: the controller stopped the run after several steps that were not finite; the state is saved.
        """
        await self._reader.start()
        ready = f"ready-{self._incarnation}"
        await self._ask(
            TrainerReady(
                report_id=ready,
                incarnation=self._incarnation,
                model_version=self._version,
                consumed=self._consumed(),
                claimed=self._checkpoints.claimed_epoch,
                solved=self._solved.report(ready),
            )
        )
        while not self._current.stop:
            if self._leaving:
                await self._ask_to_leave()
                break
            started = time.monotonic()
            batch = await self._collect()
            if batch is None:
                continue
            collected = time.monotonic()
            try:
                result, by = await self._train(batch)
            except NonFiniteStep as error:
                await self._skip(batch, error)
                continue
            self._skipped = 0
            figures = result.figures | {
                "wait_s": collected - started,
                "step_s": time.monotonic() - collected,
                "waiting_groups": len(self._batcher.waiting),
                "stale_tokens": self._batcher.stale_tokens,
                **self._scope_figures(),
            }
            report_id = f"e{self._current.epoch}-step-{self._version}"
            await self._ask(
                StepDone(
                    report_id=report_id,
                    epoch=self._current.epoch,
                    model_version=self._version,
                    consumed=self._consumed(),
                    stats=figures,
                    updates=result.updates,
                    orders=batch.orders,
                    by_domain=by.by_domain,
                    by_tag=by.by_tag,
                    solved=self._solved.report(report_id),
                )
            )
        await self._publishing.finish()
        await self._checkpointing.finish()
        stopped = TrainerStopped(epoch=self._current.epoch, model_version=self._version, left=self._leaving)
        await self._link.report(stopped)
        return self._version

    async def close(self) -> None:
        """Abandon an unfinished checkpoint, leave the process group for weight transfers, and end the worker thread."""
        await self._checkpointing.close()
        await self._publishing.close()
        self._worker.shutdown()

    # --- collect ---------------------------------------------------------------------------------------------------

    async def _collect(self) -> TrainBatch | None:
        """Wait for the next batch and return it; return None if meanwhile the run stops or the trainer leaves."""
        progress_at = reported_at = time.monotonic()
        while True:
            await self._checkpointing.raise_if_failed()
            await self._publishing.raise_if_failed()
            if self._leaving:
                return None
            if (batch := self._next_batch()) is not None:
                return batch
            if time.monotonic() - progress_at > self._settings.deadline_s:
                raise DeadlineError(
                    f"step {self._version + 1} needs {self._current.knobs.rollouts_per_step} rollouts and has "
                    f"{len(self._batcher.waiting)} groups, and nothing arrived for {self._settings.deadline_s:.0f} s; "
                    "see what the controller waits for with `pipelinerl status`"
                )
            waiting, current, ended = self._batcher.waiting, self._current, dict(self._batcher.ledger.counts)
            await self._take_in(await self._link.read())
            await self._report_progress()
            if self._current.stop:
                return None
            now = time.monotonic()
            # A group has arrived or ended.
            if self._batcher.waiting != waiting or self._batcher.ledger.counts != ended:
                progress_at = reported_at = now
            elif self._current is not current:
                progress_at = now
            if now - reported_at > RESEND_S:
                await self._link.report(Starving(epoch=self._current.epoch, model_version=self._version, held=waiting))
                reported_at = now

    def _next_batch(self) -> TrainBatch | None:
        knobs, producing = self._current.knobs, self._version + 1
        groups = self._batcher.take(
            StepBudget(rollouts=knobs.rollouts_per_step, tokens=self._settings.tokens_per_step),
            producing=producing,
            bounds=StalenessBounds(1, knobs.k),
            usable=self._step.can_train,
            must_wait=None if self._overdue is None else self._waits_for_overdue,
        )
        if groups is None:
            return None
        return build(
            groups,
            objective=self._objective.current,
            shaping=self._settings.shaping,
            truncated=self._settings.truncated,
            token_budget=self._settings.micro_batch_tokens,
            producing=producing,
            width=self._step.width,
            mini_batching=self._settings.mini_batching,
            losses=self._settings.losses,
            baselines=self._objective.baselines,
        )

    def _scope_figures(self) -> dict[str, float]:
        """Return metrics: the oldest version that is fresh enough, and the number of stale rollouts so far.

        Returns {} if staleness applies to whole groups, not to rollouts.
        """
        if self._settings.scope is StalenessScope.GROUP:
            return {}
        oldest = max(0.0, self._version - self._current.knobs.k)
        return {"oldest_fresh": oldest, "stale_rollouts": self._batcher.stale_rollouts}

    def _waits_for_overdue(self, chosen: Sequence[int]) -> bool:
        assert self._overdue is not None
        step, batcher = self._version + 1, self._batcher
        late = awaited(
            step=step, chosen=chosen, waiting=batcher.waiting, ledger=batcher.ledger, directive=self._current
        )
        return self._overdue.must_wait(late, step=step)

    async def _ask_to_leave(self) -> None:
        """Tell the controller that this trainer leaves, and wait for the directive to save a checkpoint."""
        await self._ask(
            TrainerLeaving(
                report_id=f"leave-{self._incarnation}",
                epoch=self._current.epoch,
                model_version=self._version,
                consumed=self._consumed(),
            )
        )

    async def _ask(self, question: Question) -> None:
        async for arrivals in self._link.wait_for_answer(question):
            await self._take_in(arrivals)

    async def _take_in(self, arrivals: Arrivals) -> None:
        for group in arrivals.groups:
            self._batcher.offer(group, k=self._current.knobs.k)
        for directive in arrivals.directives:
            await self._apply(directive)

    # --- step ------------------------------------------------------------------------------------------------------

    async def _train(self, batch: TrainBatch) -> tuple[StepResult, StepFigures]:
        """Take a batch's optimizer steps; return overall metrics, and those by domain and tag. Raises NonFiniteStep."""
        accumulated = await self._in_worker(lambda: self._step.accumulate(batch, self._objective.current))
        computed = time.monotonic()
        await self._until_weights_may_change()
        held = {"publish_wait_s": time.monotonic() - computed}
        peak, schedule = self._current.knobs.learning_rate, self._settings.schedule
        rates = [peak * schedule.factor(number) for number in batch.optimizer_steps]
        result = await self._in_worker(lambda: self._step.apply(accumulated, learning_rates=rates))
        self._version = batch.producing
        self._at(self._version)
        self._solved.note(batch.groups)
        self._objective.trained(batch.scored)
        by = self._watch.stepped(
            accumulated.batch,
            accumulated.batch.micro_batches,
            version=self._version,
            losses=accumulated.losses,
            entropies=accumulated.measured.of_tokens,
        )
        return StepResult(
            batch.stats | result.figures | self._objective.observe(result.figures) | held, result.updates
        ), by

    def _ended(self, groups: Iterable[RolloutGroup], outcome: GroupOutcome, why: str) -> None:
        groups = list(groups)
        if outcome is GroupOutcome.FILTERED:
            self._solved.note(groups)
        self._watch.ended(groups, outcome, why)

    async def _until_weights_may_change(self) -> None:
        await self._publishing.finish()
        await self._checkpointing.captured()

    async def _skip(self, batch: TrainBatch, error: NonFiniteStep) -> None:
        """Report a step that was not applied; raise DivergedError if the controller then stops the run."""
        await self._until_weights_may_change()
        self._skipped += 1
        self._batcher.skipped(batch.groups)
        epoch, step = self._current.epoch, self._version + 1
        log.error("step %d is skipped: %s not finite (%d in a row)", step, error, self._skipped)
        await self._ask(
            StepSkipped(
                report_id=f"e{epoch}-skip-{self._version}-{self._batcher.ledger.counts[GroupOutcome.FILTERED]}",
                epoch=epoch,
                model_version=self._version,
                consumed=self._consumed(),
                what=error.what,
                groups=error.groups,
                in_a_row=self._skipped,
            )
        )
        if self._current.stop and self._skipped >= SKIPS_THAT_END:
            await self._publishing.finish()
            await self._checkpointing.finish()
            raise DivergedError(
                f"step {step} was skipped {self._skipped} times in a row, the last time since {error} was not finite; "
                "the state before it is saved: fix the cause, or lower the learning rate, then continue with --resume"
            ) from error

    # --- apply a directive -----------------------------------------------------------------------------------------

    async def _apply(self, directive: Directive) -> None:
        if not self._claimed:  # at the first directive, fence earlier trainers before this one writes anything
            await self._in_worker(lambda: self._checkpoints.claim(directive.epoch))
            self._batcher.lineage = Lineage(directive.epoch, self._version, self._earlier)
            self._claimed = True
        self._solved.answered(directive.answers)
        self._batcher.end(directive.failed, GroupOutcome.FAILED)
        self._batcher.end(directive.stale, GroupOutcome.STALE)
        if directive.publish_to:
            await self._in_worker(lambda: self._step.will_sample(self._version, acceptance=directive.knobs.k))
            await self._publishing.begin(directive, self._version)
        # True if this version is saved already, so that stopping need not save it again.
        saved = directive.stop and self._saved == (directive.epoch, self._version)
        if directive.checkpoint and directive.controller_state is not None and not saved:
            await self._checkpoint(directive, directive.controller_state)
            self._saved = (directive.epoch, self._version)

    async def _checkpoint(self, directive: Directive, controller: dict[str, Any]) -> None:
        state = TrainingState(
            model_version=self._version,
            epoch=directive.epoch,
            offsets=self._reader.safe_offsets(lambda index: not self._batcher.ledger.has(index)),
            ledger=self._batcher.ledger.to_record(),
            controller=controller,
            kl_coefficient=self._objective.coefficient,
            baselines=dict(self._objective.baselines),
            solved=self._solved.pending,
            epochs=[[epoch, began_at] for epoch, began_at in self._batcher.lineage.epochs],
        )
        layout, parts = self._trainer.weight_layout(), self._step.parts()

        def capture() -> Capture:
            return self._checkpoints.capture(state, layout=layout, weights=self._trainer.gather_weights(), parts=parts)

        await self._checkpointing.begin(state, capture)

    # --- report ----------------------------------------------------------------------------------------------------

    def _consumed(self) -> ConsumedReport:
        ledger = self._batcher.ledger
        self._reported = ConsumedReport(
            **{str(outcome): count for outcome, count in ledger.counts.items()},
            frontier=ledger.frontier,
            beyond=sorted(ledger.beyond),
            no_signal=dict(self._batcher.no_signal),
        )
        return self._reported

    async def _report_progress(self) -> None:
        """Tell the controller which requests for groups ended without training, and which must be sampled again."""
        before, again = self._reported, self._batcher.take_abandoned()
        if self._consumed() != before or again:
            await self._link.report(
                OrdersEnded(
                    epoch=self._current.epoch, model_version=self._version, consumed=self._reported, again=again
                )
            )

    async def _in_worker(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, call)
