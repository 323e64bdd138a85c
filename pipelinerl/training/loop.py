"""The loop around a trainer: collect a batch, step, report, obey; publish and checkpoint when told.

    state       consumes              waits for                        unblocked by
    collect     rollouts, directives  enough acceptable groups         actors (new groups), knobs (k raised)
    compute     a TrainBatch          forward, backward                the backend
    apply       gradients             the publication under way        engines (they received the old weights)
    report      —                     the controller's directive       controller

A step that is not finite is not applied but reported, and its groups are accounted for as filtered; the controller ends
the run when that happens three times in a row.

A publication runs beside the next forward and backward and ends before the next `optimizer_step`, which alone changes
weights. One worker thread makes every trainer call, so the event loop keeps reading while the trainer computes.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

from inference_contract.schemas import OnUpdate, WeightLayout
from pipelinerl.errors import DeadlineError, DivergedError
from pipelinerl.messages import (
    SKIPS_THAT_END,
    ConsumedReport,
    Directive,
    OrdersEnded,
    Starving,
    StepDone,
    StepSkipped,
    TrainerReady,
    TrainerStopped,
)
from pipelinerl.objective.kl_control import KLController
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.reward import RewardShaping
from pipelinerl.objective.signal import NoSignal
from pipelinerl.staleness import StalenessBounds
from pipelinerl.streams.stream import Stream
from pipelinerl.training.checkpoints.checkpoint import Capture, CheckpointStore, TrainingState
from pipelinerl.training.checkpoints.checkpointing import Checkpointing
from pipelinerl.training.controller_link import PATIENCE_S, Conversation
from pipelinerl.training.publish.canary_check import CanaryChecker
from pipelinerl.training.publish.publishing import Publishing
from pipelinerl.training.rollouts.admission import ConsumedLedger, Fate, Lineage, has_signal, is_judged
from pipelinerl.training.rollouts.batch import TrainBatch, build, learns_from_equals
from pipelinerl.training.rollouts.batcher import Batcher, StepBudget
from pipelinerl.training.rollouts.rollout_reader import RolloutReader
from pipelinerl.training.step.adaptive import AdaptiveObjective
from pipelinerl.training.step.finite_check import Poison
from pipelinerl.training.step.schedule import LearningRateSchedule
from pipelinerl.training.step.train_step import TrainStep
from pipelinerl.weights.publisher import Publisher

log = logging.getLogger("pipelinerl")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """`deadline_s` bounds every wait of the loop, `publish_timeout_s` a publication.

    `shaping` is by domain; `kl` controls the coefficient of the KL.

    `vocab_size`, where it is known, is what the token ids of a group must lie below.
    """

    micro_batch_tokens: int
    tokens_per_step: int | None
    no_signal: NoSignal
    deadline_s: float
    on_update: OnUpdate
    schedule: LearningRateSchedule
    shaping: Mapping[str, RewardShaping] = field(default_factory=dict)
    kl: KLController | None = None
    vocab_size: int | None = None
    publish_timeout_s: float = 120.0


@final
class TrainingLoop:
    """Drives one policy, and the workers beside it, through a run. `run` returns the last version when told to stop."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        step: TrainStep,
        layout: WeightLayout,
        objective: PolicyObjective,
        stream: Stream,
        publisher: Publisher,
        canary_checker: CanaryChecker,
        checkpoints: CheckpointStore,
        restored: TrainingState | None,
        at: Callable[[int], None] = lambda version: None,
    ) -> None:
        self._settings = settings
        self._step = step
        self._trainer = step.passes.policy
        self._objective = AdaptiveObjective(
            objective, controller=settings.kl, restored=restored.kl_coefficient if restored else None
        )
        self._skipped = 0
        self._checkpoints = checkpoints
        self._at = at
        ledger = ConsumedLedger.from_record(restored.ledger) if restored else ConsumedLedger()
        self._batcher = Batcher(
            ledger=ledger,
            lineage=Lineage(0, 0),
            no_signal=settings.no_signal,
            teaches=is_judged if learns_from_equals(objective, settings.shaping) else has_signal,
            vocab_size=settings.vocab_size,
        )
        self._intake = RolloutReader(stream, offsets=restored.offsets if restored else {})
        self._talk = Conversation(stream, deadline_s=settings.deadline_s, obey=self._obey)
        self._publishing = Publishing(
            publisher,
            canary_checker,
            forward=lambda batch: self._in_worker(lambda: self._trainer.forward(batch)),
            weights=self._trainer.gather_weights,
            layout=layout,
            on_update=settings.on_update,
            timeout_s=settings.publish_timeout_s,
            report=self._talk.report,
            raise_if_fenced=self._talk.raise_if_fenced,
        )
        self._checkpointing = Checkpointing(
            checkpoints, report=self._talk.report, trim=self._trim, deadline_s=settings.deadline_s
        )
        self._earlier = tuple((epoch, began_at) for epoch, began_at in restored.epochs) if restored else ()
        self._claimed = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._reported = ConsumedReport()

    @property
    def _version(self) -> int:
        return self._trainer.model_version

    @property
    def _current(self) -> Directive:
        return self._talk.current

    async def run(self) -> int:
        """Train until a directive says stop.

        Raises:
            DivergedError: it said so because several steps in a row were not finite; the state is saved.
        """
        await self._intake.start()
        incarnation = uuid.uuid4().hex[:12]
        await self._talk.ask(
            TrainerReady(
                report_id=f"ready-{incarnation}",
                incarnation=incarnation,
                model_version=self._version,
                consumed=self._consumed(),
                claimed=self._checkpoints.claimed_epoch,
            ),
            self._intake.read_directives,
        )
        while not self._current.stop:
            started = time.monotonic()
            batch = await self._collect()
            if batch is None:
                break
            collected = time.monotonic()
            stats = await self._train(batch)
            if isinstance(stats, Poison):
                await self._skip(batch, stats)
                continue
            self._skipped = 0
            done = time.monotonic()
            stats |= {
                "wait_s": collected - started,
                "step_s": done - collected,
                "waiting_groups": self._batcher.num_waiting,
                "stale_tokens": self._batcher.stale_tokens,
            }
            step_done = StepDone(
                report_id=f"e{self._current.epoch}-step-{self._version}",
                epoch=self._current.epoch,
                model_version=self._version,
                consumed=self._consumed(),
                stats=stats,
                orders=[group.index for group in batch.groups],
            )
            await self._talk.ask(step_done, self._read)
        await self._publishing.finish()
        await self._checkpointing.finish()
        await self._talk.report(TrainerStopped(epoch=self._current.epoch, model_version=self._version))
        return self._version

    async def close(self) -> None:
        """Leave the weight group and end the worker thread."""
        await self._checkpointing.close()
        await self._publishing.close()
        self._worker.shutdown()

    # --- collect ---------------------------------------------------------------------------------------------------

    async def _collect(self) -> TrainBatch | None:
        """The next batch, or None when told to stop while waiting."""
        moved_at = told_at = time.monotonic()
        while True:
            await self._checkpointing.raise_if_failed()
            await self._publishing.raise_if_failed()
            knobs = self._current.knobs
            budget = StepBudget(rollouts=knobs.rollouts_per_step, tokens=self._settings.tokens_per_step)
            producing = self._version + 1
            groups = self._batcher.take(
                budget, producing=producing, bounds=StalenessBounds(1, knobs.k), usable=self._step.can_train
            )
            if groups is not None:
                return build(
                    groups,
                    objective=self._objective.current,
                    shaping=self._settings.shaping,
                    token_budget=self._settings.micro_batch_tokens,
                    producing=producing,
                )
            if time.monotonic() - moved_at > self._settings.deadline_s:
                raise DeadlineError(
                    f"step {producing} needs {budget.rollouts} rollouts and has {self._batcher.num_waiting} groups, "
                    f"and nothing came for {self._settings.deadline_s:.0f} s; see what the controller waits for with "
                    "`pipelinerl status`"
                )
            waiting, current, ended = self._batcher.waiting, self._current, dict(self._batcher.ledger.counts)
            for directive in await self._read(block_s=1.0):
                await self._talk.hear(directive)
            await self._report_progress()
            if self._current.stop:
                return None
            now = time.monotonic()
            if self._batcher.waiting != waiting or self._batcher.ledger.counts != ended:  # filtered ones have come, too
                moved_at = told_at = now
            elif self._current is not current:
                moved_at = now
            if now - told_at > PATIENCE_S:
                await self._talk.report(Starving(epoch=self._current.epoch, model_version=self._version, held=waiting))
                told_at = now

    async def _read(self, *, block_s: float) -> list[Directive]:
        """Take in what is new; the directives are still to be obeyed."""
        arrivals = await self._intake.read(block_s=block_s)
        for group in arrivals.groups:
            self._batcher.offer(group)
        return arrivals.directives

    # --- step ------------------------------------------------------------------------------------------------------

    async def _train(self, batch: TrainBatch) -> dict[str, float] | Poison:
        accumulated = await self._in_worker(lambda: self._step.accumulate(batch, self._objective.current))
        await self._publishing.finish()
        await self._checkpointing.captured()
        if isinstance(accumulated, Poison):
            return accumulated
        rate = self._current.knobs.learning_rate * self._settings.schedule.factor(self._version)
        stats = await self._in_worker(lambda: self._step.apply(accumulated, learning_rate=rate))
        if isinstance(stats, Poison):
            return stats
        self._at(self._version)
        return batch.stats | stats | self._objective.observe(stats)

    async def _skip(self, batch: TrainBatch, poison: Poison) -> None:
        """IssuedLedger for a step that was not applied; ends as `run` says when the controller has had enough of them."""
        self._skipped += 1
        self._batcher.skipped(batch.groups)
        epoch, step = self._current.epoch, self._version + 1
        log.error("step %d is skipped: %s not finite (%d in a row)", step, poison, self._skipped)
        report = StepSkipped(
            report_id=f"e{epoch}-skip-{self._version}-{self._batcher.ledger.counts[Fate.FILTERED]}",
            epoch=epoch,
            model_version=self._version,
            consumed=self._consumed(),
            what=poison.what,
            groups=poison.groups,
            in_a_row=self._skipped,
        )
        await self._talk.ask(report, self._read)
        if self._current.stop and self._skipped >= SKIPS_THAT_END:
            await self._publishing.finish()
            await self._checkpointing.finish()
            raise DivergedError(
                f"step {step} was skipped {self._skipped} times in a row, the last time since {poison} was not finite; "
                "the state before it is saved: mend that, or lower the learning rate, then go on with --resume"
            )

    # --- obey ------------------------------------------------------------------------------------------------------

    async def _obey(self, directive: Directive) -> None:
        if not self._claimed:  # the first: whoever was here before is shut out before this trainer writes anything
            await self._in_worker(lambda: self._checkpoints.claim(directive.epoch))
            self._batcher.lineage = Lineage(directive.epoch, self._version, self._earlier)
            self._claimed = True
        self._batcher.end(directive.failed, Fate.FAILED)
        self._batcher.end(directive.stale, Fate.STALE)
        if directive.publish_to:
            await self._in_worker(lambda: self._step.will_sample(acceptance=directive.knobs.k))
            await self._publishing.begin(self._version, directive)
        if directive.checkpoint and directive.controller_state is not None:
            await self._checkpoint(directive, directive.controller_state)

    async def _checkpoint(self, directive: Directive, controller: dict[str, Any]) -> None:
        state = TrainingState(
            model_version=self._version,
            epoch=directive.epoch,
            offsets=self._intake.safe_offsets(lambda index: not self._batcher.ledger.has(index)),
            ledger=self._batcher.ledger.to_record(),
            controller=controller,
            kl_coefficient=self._objective.coefficient,
            epochs=[[epoch, began_at] for epoch, began_at in self._batcher.lineage.epochs],
        )

        layout, parts = self._trainer.weight_layout(), self._step.parts()

        def capture() -> Capture:
            return self._checkpoints.capture(state, layout=layout, weights=self._trainer.gather_weights(), parts=parts)

        await self._checkpointing.begin(state, capture)

    async def _trim(self, offsets: dict[str, str]) -> None:
        await self._intake.trim(offsets, epoch=self._current.epoch)

    # --- report ----------------------------------------------------------------------------------------------------

    def _consumed(self) -> ConsumedReport:
        ledger = self._batcher.ledger
        self._reported = ConsumedReport(
            **{str(fate): count for fate, count in ledger.counts.items()},
            frontier=ledger.frontier,
            beyond=sorted(ledger.beyond),
        )
        return self._reported

    async def _report_progress(self) -> None:
        """Tell the controller of groups that ended without a step, or must come again, so that it may issue orders."""
        before, again = self._reported, self._batcher.take_abandoned()
        if self._consumed() != before or again:
            await self._talk.report(
                OrdersEnded(
                    epoch=self._current.epoch, model_version=self._version, consumed=self._reported, again=again
                )
            )

    async def _in_worker(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, call)
