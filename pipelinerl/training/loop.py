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
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, final

from inference_contract.schemas import OnUpdate, WeightLayout
from pipelinerl.errors import DeadlineError, DivergedError, FencedError, UpdateError
from pipelinerl.messages import (
    REPORTS,
    SKIPS_THAT_END,
    Checkpointed,
    Consumed,
    Directive,
    Message,
    Progress,
    Published,
    Starving,
    StepDone,
    StepSkipped,
    TrainerReady,
    TrainerStopped,
    encode,
)
from pipelinerl.objective.kl_control import KLController
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.reward import RewardShaping
from pipelinerl.objective.signal import NoSignal
from pipelinerl.staleness import StalenessBounds
from pipelinerl.streams.stream import Stream
from pipelinerl.training.adaptive import AdaptiveObjective
from pipelinerl.training.admission import Fate, Ledger, Lineage, has_signal, is_judged
from pipelinerl.training.batch import TrainBatch, build, learns_from_equals
from pipelinerl.training.batcher import Batcher, StepBudget
from pipelinerl.training.checkpoint import CheckpointStore, TrainingState
from pipelinerl.training.guard import Poison
from pipelinerl.training.intake import Intake
from pipelinerl.training.schedule import LearningRateSchedule
from pipelinerl.training.step import TrainStep
from pipelinerl.weights.publisher import Publication, Publisher, PublishReport

log = logging.getLogger("pipelinerl")
#: What is silent for longer is asked, or told, again.
_PATIENCE_S: Final = 5.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """`deadline_s` bounds every wait of the loop; `shaping` is by domain; `kl` controls the coefficient of the KL."""

    micro_batch_tokens: int
    tokens_per_step: int | None
    no_signal: NoSignal
    deadline_s: float
    on_update: OnUpdate
    schedule: LearningRateSchedule
    shaping: Mapping[str, RewardShaping] = field(default_factory=dict)
    kl: KLController | None = None


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
        checkpoints: CheckpointStore,
        restored: TrainingState | None,
        at: Callable[[int], None] = lambda version: None,
    ) -> None:
        self._settings = settings
        self._step = step
        self._trainer = step.passes.policy
        self._layout = layout
        self._objective = AdaptiveObjective(
            objective, controller=settings.kl, restored=restored.kl_coefficient if restored else None
        )
        self._skipped = 0
        self._stream = stream
        self._publisher = publisher
        self._checkpoints = checkpoints
        self._at = at
        ledger = Ledger.from_record(restored.ledger) if restored else Ledger()
        self._batcher = Batcher(
            ledger=ledger,
            lineage=Lineage(0, 0),
            no_signal=settings.no_signal,
            teaches=is_judged if learns_from_equals(objective, settings.shaping) else has_signal,
        )
        self._intake = Intake(stream, offsets=restored.offsets if restored else {})
        self._directive: Directive | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._reported = Consumed()

    @property
    def _version(self) -> int:
        return self._trainer.model_version

    async def run(self) -> int:
        """Train until a directive says stop.

        Raises:
            DivergedError: it said so because several steps in a row were not finite; the state is saved.
        """
        await self._intake.start()
        incarnation = uuid.uuid4().hex[:12]
        await self._ask(
            TrainerReady(
                report_id=f"ready-{incarnation}",
                incarnation=incarnation,
                model_version=self._version,
                consumed=self._consumed(),
            ),
            self._intake.read_orders,
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
            await self._ask(step_done, self._read)
        await self._finish_publication()
        await self._report(TrainerStopped(epoch=self._current.epoch, model_version=self._version))
        return self._version

    async def close(self) -> None:
        """Leave the weight group and end the worker thread."""
        await self._publisher.close()
        self._worker.shutdown()

    # --- collect ---------------------------------------------------------------------------------------------------

    async def _collect(self) -> TrainBatch | None:
        """The next batch, or None when told to stop while waiting."""
        heard_at = time.monotonic()
        deadline = heard_at + self._settings.deadline_s
        while True:
            knobs = self._current.knobs
            budget = StepBudget(rollouts=knobs.rollouts_per_step, tokens=self._settings.tokens_per_step)
            producing = self._version + 1
            groups = self._batcher.take(budget, producing=producing, bounds=StalenessBounds(1, knobs.k))
            if groups is not None:
                return build(
                    groups,
                    objective=self._objective.current,
                    shaping=self._settings.shaping,
                    token_budget=self._settings.micro_batch_tokens,
                    producing=producing,
                )
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"step {producing} waited {self._settings.deadline_s:.0f} s for {budget.rollouts} rollouts and has "
                    f"{self._batcher.num_waiting} groups; see what the controller waits for with `pipelinerl status`"
                )
            waiting = self._batcher.waiting
            for directive in await self._read(block_s=1.0):
                await self._hear(directive)
            await self._report_progress()
            if self._current.stop:
                return None
            if self._batcher.waiting != waiting:
                heard_at = time.monotonic()
            elif time.monotonic() - heard_at > _PATIENCE_S:
                await self._report(Starving(epoch=self._current.epoch, model_version=self._version, held=waiting))
                heard_at = time.monotonic()

    async def _read(self, *, block_s: float) -> list[Directive]:
        """Take in what is new; the directives are still to be obeyed."""
        arrivals = await self._intake.read(block_s=block_s)
        for group in arrivals.groups:
            self._batcher.offer(group)
        return arrivals.directives

    # --- step ------------------------------------------------------------------------------------------------------

    async def _train(self, batch: TrainBatch) -> dict[str, float] | Poison:
        accumulated = await self._in_worker(lambda: self._step.accumulate(batch, self._objective.current))
        await self._finish_publication()
        if isinstance(accumulated, Poison):
            return accumulated
        rate = self._current.knobs.learning_rate * self._settings.schedule.factor(self._version)
        stats = await self._in_worker(lambda: self._step.apply(accumulated, learning_rate=rate))
        if isinstance(stats, Poison):
            return stats
        self._at(self._version)
        return batch.stats | stats | self._objective.observe(stats)

    async def _skip(self, batch: TrainBatch, poison: Poison) -> None:
        """Account for a step that was not applied; ends as `run` says when the controller has had enough of them."""
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
        await self._ask(report, self._read)
        if self._current.stop and self._skipped >= SKIPS_THAT_END:
            await self._finish_publication()
            raise DivergedError(
                f"step {step} was skipped {self._skipped} times in a row, the last time since {poison} was not finite; "
                "the state before it is saved: mend that, or lower the learning rate, then go on with --resume"
            )

    # --- obey ------------------------------------------------------------------------------------------------------

    @property
    def _current(self) -> Directive:
        assert self._directive is not None, "the loop obeys a directive before anything else"
        return self._directive

    async def _ask(
        self, question: TrainerReady | StepDone | StepSkipped, read: Callable[..., Awaitable[list[Directive]]]
    ) -> None:
        """Report, and again every few seconds (the server may have lost it, or its answer), until it is answered.

        The answer is obeyed, and so is what was said unasked, in its order.
        """
        deadline = time.monotonic() + self._settings.deadline_s
        asked_at = float("-inf")
        while (now := time.monotonic()) < deadline:
            if now - asked_at >= _PATIENCE_S:
                await self._report(question)
                asked_at = now
            awaited = question.report_id
            for directive in await read(block_s=1.0):
                if await self._hear(directive, awaited):
                    awaited = ""
            if not awaited:
                return
        raise DeadlineError(
            f"the trainer waited {self._settings.deadline_s:.0f} s for the controller to answer {question.report_id}; "
            "is the controller running, with an engine that has joined?"
        )

    async def _hear(self, directive: Directive, awaited: str = "") -> bool:
        """Obey a directive that answers `awaited`, or that answers nobody; True when it was the answer.

        Raises:
            FencedError: it is meant for a trainer that came after this one.
        """
        if self._directive is not None and directive.epoch > self._directive.epoch:
            raise FencedError(
                f"epoch {directive.epoch} has taken over from epoch {self._directive.epoch}: another trainer is "
                "running; this one stops"
            )
        questions = ("ready-", f"e{directive.epoch}-step-", f"e{directive.epoch}-skip-")
        unasked = not directive.answers.startswith(questions)
        is_answer = directive.answers == awaited
        if is_answer or (unasked and self._directive is not None):
            await self._obey(directive)
        return is_answer

    async def _obey(self, directive: Directive) -> None:
        if self._directive is None:
            self._batcher.lineage = Lineage(directive.epoch, self._version)
        elif directive.epoch < self._directive.epoch:
            return
        self._directive = directive
        ledger = self._batcher.ledger
        ledger.settle([index for index in directive.failed if not ledger.has(index)], Fate.FAILED)
        if directive.publish_to:
            await self._finish_publication()
            self._publishing = asyncio.create_task(self._publish(directive))
        if directive.checkpoint and directive.controller_state is not None:
            await self._checkpoint(directive, directive.controller_state)

    async def _publish(self, directive: Directive) -> None:
        publication = Publication(
            version=self._version,
            epoch=directive.epoch,
            layout=self._layout,
            weights=self._trainer.gather_weights,
            engines=directive.publish_to,
            membership=directive.membership,
            on_update=self._settings.on_update,
        )
        try:
            report = await self._publisher.publish(publication)
        except UpdateError as error:
            log.error("publication of version %d failed: %s", publication.version, error)
            report = PublishReport.failure(publication, str(error))
        await self._report(
            Published(
                epoch=report.epoch,
                model_version=report.version,
                membership=directive.membership,
                pauses_s=dict(report.pauses_s),
                failed=dict(report.failed),
                send_s=report.send_s,
                total_s=report.total_s,
            )
        )

    async def _finish_publication(self) -> None:
        if self._publishing is not None:
            task, self._publishing = self._publishing, None
            await task

    async def _checkpoint(self, directive: Directive, controller: dict[str, Any]) -> None:
        state = TrainingState(
            model_version=self._version,
            epoch=directive.epoch,
            offsets=self._intake.safe_offsets(lambda index: not self._batcher.ledger.has(index)),
            ledger=self._batcher.ledger.to_record(),
            controller=controller,
            kl_coefficient=self._objective.coefficient,
        )
        path = await self._in_worker(
            lambda: self._checkpoints.save(
                state,
                layout=self._trainer.weight_layout(),
                weights=self._trainer.gather_weights(),
                parts=self._step.parts(),
            )
        )
        await self._intake.trim(await asyncio.to_thread(self._checkpoints.oldest_kept_offsets))
        await self._report(Checkpointed(epoch=directive.epoch, model_version=self._version, path=str(path)))

    # --- report ----------------------------------------------------------------------------------------------------

    def _consumed(self) -> Consumed:
        ledger = self._batcher.ledger
        self._reported = Consumed(
            **{str(fate): count for fate, count in ledger.counts.items()},
            frontier=ledger.frontier,
            beyond=sorted(ledger.beyond),
        )
        return self._reported

    async def _report_progress(self) -> None:
        """Tell the controller of groups that ended without a step, or must come again, so that it may issue orders."""
        before, again = self._reported, self._batcher.take_abandoned()
        if self._consumed() != before or again:
            await self._report(
                Progress(epoch=self._current.epoch, model_version=self._version, consumed=self._reported, again=again)
            )

    async def _report(self, message: Message) -> None:
        await self._stream.append(REPORTS, [encode(message)])

    async def _in_worker(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, call)
