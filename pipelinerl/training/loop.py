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
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, TypeVar

from pipelinerl.errors import DeadlineError, DivergedError, Rewound
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
from pipelinerl.staleness import StalenessBounds
from pipelinerl.training.batch import TrainBatch, build
from pipelinerl.training.checkpoints.checkpoint import Capture, Checkpointing
from pipelinerl.training.checkpoints.manifest import TrainingState
from pipelinerl.training.domain_metrics import DomainMetrics
from pipelinerl.training.finite_check import NonFiniteStep
from pipelinerl.training.publishing import Publishing
from pipelinerl.training.rollouts.admission import GroupOutcome
from pipelinerl.training.rollouts.batcher import Batcher, OverdueWait, StepBudget, awaited
from pipelinerl.training.rollouts.rollout_reader import RESEND_S, Arrivals, ControllerLink
from pipelinerl.training.schedule import AdaptiveObjective, LearningRateSchedule
from pipelinerl.training.step import Accumulated, Step
from pipelinerl.training.step_samples import StepSamples

log = logging.getLogger("pipelinerl")
T = TypeVar("T")


class TrainingLoop:
    """The loop that trains one policy, from the first batch until the run stops."""

    def __init__(
        self,
        *,
        step: Step,
        objective: AdaptiveObjective,
        schedule: LearningRateSchedule,
        batcher: Batcher,
        link: ControllerLink,
        publishing: Publishing,
        checkpointing: Checkpointing,
        worker: Executor,
        metrics: DomainMetrics,
        samples: StepSamples | None = None,
        tokens_per_step: int | None = None,
        overdue: OverdueWait | None = None,
        at: Callable[[int], None] = lambda version: None,
    ) -> None:
        """Create the loop of the policy at version `batcher.lineage.began_at`.

        `schedule` counts optimizer steps, of which a batch may have several. `worker` is the trainer's thread. A step
        with enough groups may wait for late groups until `overdue` gives up. `at` is called with each new version.
        """
        self._step = step
        self._objective = objective
        self._schedule = schedule
        self._batcher = batcher
        self._link = link
        self._publishing = publishing
        self._checkpointing = checkpointing
        self._worker = worker
        self._metrics = metrics
        self._samples = samples
        self._tokens_per_step = tokens_per_step
        self._overdue = overdue
        self._at = at
        self._version = batcher.lineage.began_at
        self._skipped = 0  # steps in a row that were not finite
        self._leaving = self._cannot_rewind = False
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
        await self._link.reader.start()
        ready = f"ready-{self._link.incarnation}"
        await self._ask(
            TrainerReady(
                report_id=ready,
                incarnation=self._link.incarnation,
                model_version=self._version,
                consumed=self._consumed(),
                claimed=self._checkpointing.store.claimed_epoch,
                solved=self._batcher.solved.report(ready),
            )
        )
        while not self._current.stop:
            if self._leaving:
                await self._ask_to_leave()
                break
            if self._must_rewind:
                await self._rewind()
            began = time.monotonic()
            if (batch := await self._collect()) is not None:
                await self._train(batch, wait_s=time.monotonic() - began)
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
        while not (self._leaving or self._current.stop or self._must_rewind):
            await self._checkpointing.raise_if_failed()
            await self._publishing.raise_if_failed()
            if (batch := self._next_batch()) is not None:
                return batch
            if time.monotonic() - progress_at > self._link.deadline_s:
                raise DeadlineError(
                    f"step {self._version + 1} needs {self._current.knobs.rollouts_per_step} rollouts and has "
                    f"{len(self._batcher.waiting)} groups, and nothing arrived for {self._link.deadline_s:.0f} s; "
                    "see what the controller waits for with `pipelinerl status`"
                )
            waiting, current, ended = self._batcher.waiting, self._current, dict(self._batcher.ledger.counts)
            await self._take_in(await self._link.read())
            await self._report_progress()
            now = time.monotonic()
            # A group has arrived or ended.
            if self._batcher.waiting != waiting or self._batcher.ledger.counts != ended:
                progress_at = reported_at = now
            elif self._current is not current:
                progress_at = now
            if now - reported_at > RESEND_S:
                await self._link.report(Starving(epoch=self._current.epoch, model_version=self._version, held=waiting))
                reported_at = now
        return None

    def _next_batch(self) -> TrainBatch | None:
        knobs, producing = self._current.knobs, self._version + 1
        groups = self._batcher.take(
            StepBudget(rollouts=knobs.rollouts_per_step, tokens=self._tokens_per_step),
            producing=producing,
            bounds=StalenessBounds(1, knobs.k),
            usable=self._step.can_train,
            must_wait=None if self._overdue is None else self._waits_for_overdue,
        )
        if groups is None:
            return None
        objective = self._objective
        return build(
            groups,
            self._step.rules,
            objective=objective.current,
            producing=producing,
            baselines=objective.baselines,
        )

    def _waits_for_overdue(self, chosen: Sequence[int]) -> bool:
        assert self._overdue is not None
        step, batcher = self._version + 1, self._batcher
        late = awaited(
            step=step, chosen=chosen, waiting=batcher.waiting, ledger=batcher.ledger, directive=self._current
        )
        return self._overdue.must_wait(late, step=step)

    # --- step ------------------------------------------------------------------------------------------------------

    async def _train(self, batch: TrainBatch, *, wait_s: float) -> None:
        """Take a batch's optimizer steps and report them; skip a batch with a value that is not finite.

        A batch in which an engine with a fault sampled tokens is dissolved, and collected again.
        """
        began = time.monotonic()
        try:
            accumulated = await self._in_worker(lambda: self._step.accumulate(batch))
            computed = time.monotonic()
            await self._until_weights_may_change()
            if await self._is_disproved(accumulated):
                return
            held_s = time.monotonic() - computed
            peak = self._current.knobs.learning_rate
            rates = [peak * self._schedule.factor(number) for number in batch.optimizer_steps]
            result = await self._in_worker(lambda: self._step.apply(accumulated, learning_rates=rates))
        except NonFiniteStep as error:
            await self._skip(batch, error)
            return
        self._version, self._skipped = batch.producing, 0
        self._at(self._version)
        self._metrics.add(batch.groups)
        if self._samples is not None:
            self._samples.write(accumulated)
        self._objective.trained(batch.scored)
        stats = {
            **result.figures,
            **self._objective.observe(result.figures),
            **self._batcher.figures(version=self._version, k=self._current.knobs.k),
            "publish_wait_s": held_s,
            "wait_s": wait_s,
            "step_s": time.monotonic() - began,
        }
        by_domain, by_tag = self._metrics.take()
        report_id = f"e{self._current.epoch}-step-{self._version}"
        await self._ask(
            StepDone(
                report_id=report_id,
                epoch=self._current.epoch,
                model_version=self._version,
                consumed=self._consumed(),
                stats=stats,
                updates=result.updates,
                orders=batch.orders,
                by_domain=by_domain,
                by_tag=by_tag,
                solved=self._batcher.solved.report(report_id),
            )
        )

    async def _is_disproved(self, accumulated: Accumulated) -> bool:
        """Drop what an engine sampled with a fault; if the batch has such tokens, return its other groups and True."""
        groups = accumulated.batch.groups
        if disproved := await self._publishing.disproved(accumulated, self._version):
            self._batcher.doubt(disproved)
        if not any(map(self._batcher.is_doubtful, groups)):
            return False
        await self._in_worker(self._step.discard)
        self._batcher.take_back(groups)
        return True

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

    # --- report, and apply directives ------------------------------------------------------------------------------

    async def _ask(self, question: Question) -> None:
        async for arrivals in self._link.wait_for_answer(question):
            await self._take_in(arrivals)

    async def _ask_to_leave(self) -> None:
        """Tell the controller that this trainer leaves, and wait for the directive to save a checkpoint."""
        await self._ask(
            TrainerLeaving(
                report_id=f"leave-{self._link.incarnation}",
                epoch=self._current.epoch,
                model_version=self._version,
                consumed=self._consumed(),
            )
        )

    @property
    def _must_rewind(self) -> bool:
        return self._current.rewind_to is not None and not self._cannot_rewind

    async def _rewind(self) -> None:
        """Abandon the checkpoints after the version to return to, and raise Rewound, unless there is no older one.

        The trainer's process then starts again from the newest checkpoint left, as after a crash, so every group still
        trains exactly once in the run's history.
        """
        version, epoch = self._current.rewind_to, self._current.epoch
        assert version is not None
        await self._publishing.finish()
        await self._checkpointing.finish()
        store = self._checkpointing.store
        target = await self._in_worker(lambda: store.rewind(epoch, version))
        if target is not None and target < self._version:
            raise Rewound(f"the run has collapsed and returns from version {self._version} to version {target}")
        log.error("no checkpoint is older than version %d: the run cannot return to version %d", self._version, version)
        self._cannot_rewind = True

    async def _take_in(self, arrivals: Arrivals) -> None:
        for group in arrivals.groups:
            self._batcher.offer(group, k=self._current.knobs.k)
        for directive in arrivals.directives:
            await self._apply(directive)

    async def _apply(self, directive: Directive) -> None:
        batcher, store = self._batcher, self._checkpointing.store
        if batcher.lineage.epoch != directive.epoch:
            # At the first directive, fence earlier trainers before this one writes anything.
            await self._in_worker(lambda: store.claim(directive.epoch))
            batcher.lineage = replace(batcher.lineage, epoch=directive.epoch)
        batcher.solved.answered(directive.answers)
        batcher.end(directive.failed, GroupOutcome.FAILED)
        batcher.end(directive.stale, GroupOutcome.STALE)
        if directive.publish_to:
            await self._in_worker(lambda: self._step.will_sample(self._version, acceptance=directive.knobs.k))
            await self._publishing.begin(directive, self._version)
        # A version that is saved already need not be saved again when the run stops.
        saved = directive.stop and self._checkpointing.version == self._version
        if directive.checkpoint and directive.controller_state is not None and not saved:
            await self._checkpoint(directive, directive.controller_state)

    async def _checkpoint(self, directive: Directive, controller: dict[str, Any]) -> None:
        batcher, store, policy = self._batcher, self._checkpointing.store, self._step.policy
        state = TrainingState(
            model_version=self._version,
            epoch=directive.epoch,
            offsets=self._link.reader.safe_offsets(lambda index: not batcher.ledger.has(index)),
            ledger=batcher.ledger.to_record(),
            controller=controller,
            kl_coefficient=self._objective.coefficient,
            baselines=dict(self._objective.baselines),
            solved=batcher.solved.pending,
            epochs=[[epoch, began_at] for epoch, began_at in batcher.lineage.epochs],
            doubted=sorted(map(list, batcher.doubted)),
        )
        layout, parts = policy.weight_layout(), self._step.parts()

        def capture() -> Capture:
            return store.capture(state, layout=layout, weights=policy.gather_weights(), parts=parts)

        await self._checkpointing.begin(state, capture)

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
