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
changes weights. One worker thread makes every trainer call, so that publications and checkpoints go on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from inference_contract.weights import OnUpdate
from pipelinerl.enums import NoSignal, StalenessScope
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
from pipelinerl.objective.kl_control import KLController
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.staleness import StalenessBounds
from pipelinerl.streams.stream import Stream
from pipelinerl.training.batch import NonFiniteStep, TrainBatch, build
from pipelinerl.training.canary_check import CanaryCheck
from pipelinerl.training.checkpoints.checkpoint import Capture, Checkpointing, CheckpointStore
from pipelinerl.training.checkpoints.manifest import TrainingState
from pipelinerl.training.domain_metrics import DomainMetrics
from pipelinerl.training.engine_proofs import EngineProofs, Replica
from pipelinerl.training.publishing import Publishing
from pipelinerl.training.rollouts.admission import (
    ConsumedLedger,
    GroupOutcome,
    Lineage,
    Proof,
    SolvedProblems,
    signal_of,
    teacher,
)
from pipelinerl.training.rollouts.batcher import Batcher, OverdueWait, StepBudget, awaited
from pipelinerl.training.rollouts.rollout_reader import RESEND_S, Arrivals, ControllerLink, RolloutReader
from pipelinerl.training.schedule import AdaptiveObjective, LearningRateSchedule
from pipelinerl.training.step import Accumulated, Step
from pipelinerl.training.step_samples import StepSamples
from pipelinerl.types import RolloutGroup
from pipelinerl.weights.publisher import Publisher
from trainer_contract.types import RoutingShape

log = logging.getLogger("pipelinerl")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """Settings of a training loop, except those of its step.

    `deadline_s` bounds every wait of the loop, and `publish_timeout_s` a publication. A step with enough groups may
    wait up to `overdue_s` for late groups that would be too stale for the next step (None: no wait). `schedule` counts
    optimizer steps. Token ids must be below `vocab_size`. If recorded MoE routing is replayed, `routing` has the
    routers' sizes.
    """

    no_signal: NoSignal
    deadline_s: float
    on_update: OnUpdate
    schedule: LearningRateSchedule
    tokens_per_step: int | None = None
    kl: KLController | None = None
    vocab_size: int | None = None
    routing: RoutingShape | None = None
    publish_timeout_s: float = 120.0
    scope: StalenessScope = StalenessScope.GROUP
    overdue_s: float | None = None


@dataclass(slots=True, kw_only=True)
class TrainingLoop:
    """The loop that trains one policy, from the first batch until the run stops; `training_loop` composes it."""

    settings: LoopSettings
    step: Step
    objective: AdaptiveObjective
    batcher: Batcher
    link: ControllerLink
    publishing: Publishing
    checkpointing: Checkpointing
    worker: Executor
    """The trainer's thread."""
    metrics: DomainMetrics
    samples: StepSamples | None
    overdue: OverdueWait | None
    """Gives up the wait for late groups; None if a step with enough groups never waits."""
    at: Callable[[int], None]
    """Called with each new version."""
    use_cores: Callable[[Sequence[int]], None]
    """Called on the trainer's thread with the directives' cores whenever they change."""
    version: int
    skipped: int = 0
    """Steps in a row that were not finite."""
    leaving: bool = False
    cannot_rewind: bool = False
    cores: list[int] | None = None
    reported: ConsumedReport = field(default_factory=ConsumedReport)

    @property
    def _current(self) -> Directive:
        return self.link.current

    def leave(self) -> None:
        """Let `run` save the state and return between two steps; actors and engines continue without this trainer."""
        self.leaving = True

    async def run(self) -> int:
        """Train until a directive stops the run or `leave` takes effect; return the version. Raises DivergedError."""
        await self.link.reader.start()
        ready = f"ready-{self.link.incarnation}"
        await self._ask(
            TrainerReady(
                report_id=ready,
                incarnation=self.link.incarnation,
                model_version=self.version,
                consumed=self._consumed(),
                claimed=self.checkpointing.store.claimed_epoch,
                solved=self.batcher.solved.report(ready),
            )
        )
        while not self._current.stop:
            if self.leaving:
                # Wait for the directive to save a checkpoint.
                await self._ask(
                    TrainerLeaving(
                        report_id=f"leave-{self.link.incarnation}",
                        epoch=self._current.epoch,
                        model_version=self.version,
                        consumed=self._consumed(),
                    )
                )
                break
            if self._must_rewind:
                await self._rewind()
            began = time.monotonic()
            if (groups := await self._collect()) is not None:
                await self._train(groups, wait_s=time.monotonic() - began)
        await self.publishing.finish()
        await self.checkpointing.finish()
        stopped = TrainerStopped(epoch=self._current.epoch, model_version=self.version, left=self.leaving)
        await self.link.report(stopped)
        return self.version

    async def close(self) -> None:
        """Abandon an unfinished checkpoint, leave the process group for weight transfers, and end the worker thread."""
        await self.checkpointing.close()
        await self.publishing.close()
        self.worker.shutdown()

    # --- collect ---------------------------------------------------------------------------------------------------

    async def _collect(self) -> list[RolloutGroup] | None:
        """Wait for the next step's groups; return None if meanwhile the run stops or the trainer leaves."""
        batcher = self.batcher
        progress_at = reported_at = time.monotonic()
        while not (self.leaving or self._current.stop or self._must_rewind):
            await self.checkpointing.raise_if_failed()
            await self.publishing.raise_if_failed()
            if disproved := self.publishing.ask_again(self.version):
                batcher.doubt(disproved)
            if (groups := self._next_groups()) is not None:
                return groups
            if time.monotonic() - progress_at > self.link.deadline_s:
                raise DeadlineError(
                    f"step {self.version + 1} needs {self._current.knobs.rollouts_per_step} rollouts and has "
                    f"{len(self.batcher.waiting)} groups, and nothing arrived for {self.link.deadline_s:.0f} s; "
                    "see what the controller waits for with `pipelinerl status`"
                )
            waiting, current, ended = batcher.waiting, self._current, dict(batcher.ledger.counts)
            await self._take_in(await self.link.read())
            # Tell the controller which requests ended without training, and which must be sampled again.
            before, again = self.reported, batcher.take_abandoned()
            if self._consumed() != before or again:
                await self.link.report(
                    OrdersEnded(
                        epoch=self._current.epoch, model_version=self.version, consumed=self.reported, again=again
                    )
                )
            now = time.monotonic()
            # A group has arrived or ended.
            if batcher.waiting != waiting or batcher.ledger.counts != ended:
                progress_at = reported_at = now
            elif self._current is not current:
                progress_at = now
            if now - reported_at > RESEND_S:
                await self.link.report(Starving(epoch=self._current.epoch, model_version=self.version, held=waiting))
                reported_at = now
        return None

    def _next_groups(self) -> list[RolloutGroup] | None:
        knobs, producing, batcher, overdue = self._current.knobs, self.version + 1, self.batcher, self.overdue

        def must_wait(chosen: Sequence[int]) -> bool:
            assert overdue is not None
            late = awaited(
                step=producing,
                chosen=chosen,
                waiting=batcher.waiting,
                ledger=batcher.ledger,
                directive=self._current,
            )
            return overdue.must_wait(late, step=producing)

        return batcher.take(
            StepBudget(rollouts=knobs.rollouts_per_step, tokens=self.settings.tokens_per_step),
            producing=producing,
            bounds=StalenessBounds(1, knobs.k),
            usable=self.step.can_train,
            proof_of=self.publishing.proof_of,
            must_wait=None if overdue is None else must_wait,
        )

    # --- step ------------------------------------------------------------------------------------------------------

    def _batch(self, groups: Sequence[RolloutGroup]) -> TrainBatch:
        objective, baselines = self.objective.current, self.objective.baselines
        return build(groups, self.step.rules, objective=objective, producing=self.version + 1, baselines=baselines)

    async def _train(self, groups: Sequence[RolloutGroup], *, wait_s: float) -> None:
        """Train these groups and report it; skip their batch if not finite, dissolve it if an engine is faulty."""
        began = time.monotonic()
        batch = await self._in_worker(lambda: self._batch(groups))
        try:
            accumulated = await self._in_worker(lambda: self.step.accumulate(batch))
            computed = time.monotonic()
            await self._until_weights_may_change()
            if await self._is_disproved(accumulated):
                return
            held_s = time.monotonic() - computed
            peak = self._current.knobs.learning_rate
            rates = [peak * self.settings.schedule.factor(number) for number in batch.optimizer_steps]
            result = await self._in_worker(lambda: self.step.apply(accumulated, learning_rates=rates))
        except NonFiniteStep as error:
            await self._skip(batch, error)
            return
        self.version, self.skipped = batch.producing, 0
        self.at(self.version)
        self.metrics.add(batch.groups)
        if self.samples is not None:
            self.samples.write(accumulated)
        self.objective.trained(batch.scored)
        stats = {
            **result.figures,
            **self.objective.observe(result.figures),
            **self.batcher.figures(version=self.version, k=self._current.knobs.k),
            "publish_wait_s": held_s,
            "wait_s": wait_s,
            "step_s": time.monotonic() - began,
        }
        by_domain, by_tag = self.metrics.take()
        report_id = f"e{self._current.epoch}-step-{self.version}"
        await self._ask(
            StepDone(
                report_id=report_id,
                epoch=self._current.epoch,
                model_version=self.version,
                consumed=self._consumed(),
                stats=stats,
                updates=result.updates,
                orders=batch.orders,
                by_domain=by_domain,
                by_tag=by_tag,
                solved=self.batcher.solved.report(report_id),
            )
        )

    async def _is_disproved(self, accumulated: Accumulated) -> bool:
        """Drop what an engine sampled with a fault, or without a proof; then return the other groups and True."""
        groups, proof_of = accumulated.batch.groups, self.publishing.proof_of
        if disproved := await self.publishing.disproved(accumulated, self.version):
            self.batcher.doubt(disproved)
        if not any(self.batcher.is_doubtful(each) or proof_of(each) is not Proof.COMPLETE for each in groups):
            return False
        await self._in_worker(self.step.discard)
        self.batcher.take_back(groups)
        return True

    async def _until_weights_may_change(self) -> None:
        await self.publishing.finish()
        await self.checkpointing.captured()

    async def _skip(self, batch: TrainBatch, error: NonFiniteStep) -> None:
        await self._until_weights_may_change()
        self.skipped += 1
        self.batcher.skipped(batch.groups)
        epoch, step = self._current.epoch, self.version + 1
        log.error("step %d is skipped: %s not finite (%d in a row)", step, error, self.skipped)
        await self._ask(
            StepSkipped(
                report_id=f"e{epoch}-skip-{self.version}-{self.batcher.ledger.counts[GroupOutcome.FILTERED]}",
                epoch=epoch,
                model_version=self.version,
                consumed=self._consumed(),
                what=error.what,
                groups=error.groups,
                in_a_row=self.skipped,
            )
        )
        if self._current.stop and self.skipped >= SKIPS_THAT_END:
            await self.publishing.finish()
            await self.checkpointing.finish()
            raise DivergedError(
                f"step {step} was skipped {self.skipped} times in a row, the last time since {error} was not finite; "
                "the state before it is saved: fix the cause, or lower the learning rate, then continue with --resume"
            ) from error

    # --- report, and apply directives ------------------------------------------------------------------------------

    async def _ask(self, question: Question) -> None:
        async for arrivals in self.link.wait_for_answer(question):
            await self._take_in(arrivals)

    @property
    def _must_rewind(self) -> bool:
        return self._current.rewind_to is not None and not self.cannot_rewind

    async def _rewind(self) -> None:
        """Abandon the checkpoints after the version to return to, and raise Rewound, unless there is no older one.

        The trainer's process then starts again from the newest checkpoint left, as after a crash, so every group still
        trains exactly once in the run's history.
        """
        version, epoch = self._current.rewind_to, self._current.epoch
        assert version is not None
        await self.publishing.finish()
        await self.checkpointing.finish()
        store = self.checkpointing.store
        target = await self._in_worker(lambda: store.rewind(epoch, version))
        if target is not None and target < self.version:
            raise Rewound(f"the run has collapsed and returns from version {self.version} to version {target}")
        log.error("no checkpoint is older than version %d: the run cannot return to version %d", self.version, version)
        self.cannot_rewind = True

    async def _take_in(self, arrivals: Arrivals) -> None:
        for group in arrivals.groups:
            self.batcher.offer(group, k=self._current.knobs.k)
        for directive in arrivals.directives:
            await self._apply(directive)

    async def _apply(self, directive: Directive) -> None:
        batcher, store = self.batcher, self.checkpointing.store
        if batcher.lineage.epoch != directive.epoch:
            # At the first directive, fence earlier trainers before this one writes anything.
            await self._in_worker(lambda: store.claim(directive.epoch))
            batcher.lineage = replace(batcher.lineage, epoch=directive.epoch)
        if directive.cores != self.cores:
            self.cores = directive.cores
            await self._in_worker(lambda: self.use_cores(directive.cores))
        batcher.solved.answered(directive.answers)
        batcher.end(directive.failed, GroupOutcome.FAILED)
        batcher.end(directive.stale, GroupOutcome.STALE)
        if directive.publish_to:
            await self._in_worker(lambda: self.step.will_sample(self.version, acceptance=directive.knobs.k))
            await self.publishing.begin(directive, self.version)
        # A version that is saved already need not be saved again when the run stops.
        saved = directive.stop and self.checkpointing.version == self.version
        if directive.checkpoint and directive.controller_state is not None and not saved:
            await self._checkpoint(directive, directive.controller_state)

    async def _checkpoint(self, directive: Directive, controller: dict[str, Any]) -> None:
        batcher, store, policy = self.batcher, self.checkpointing.store, self.step.policy
        state = TrainingState(
            model_version=self.version,
            epoch=directive.epoch,
            offsets=self.link.reader.safe_offsets(lambda index: not batcher.ledger.has(index)),
            ledger=batcher.ledger.to_record(),
            controller=controller,
            kl_coefficient=self.objective.coefficient,
            baselines=dict(self.objective.baselines),
            solved=batcher.solved.pending,
            epochs=[[epoch, began_at] for epoch, began_at in batcher.lineage.epochs],
            doubted=sorted(map(list, batcher.doubted)),
        )
        layout, parts = policy.weight_layout(), self.step.parts()

        def capture() -> Capture:
            return store.capture(state, layout=layout, weights=policy.gather_weights(), parts=parts)

        await self.checkpointing.begin(state, capture)

    def _consumed(self) -> ConsumedReport:
        ledger = self.batcher.ledger
        self.reported = ConsumedReport(
            **{str(outcome): count for outcome, count in ledger.counts.items()},
            frontier=ledger.frontier,
            beyond=sorted(ledger.beyond),
            no_signal=dict(self.batcher.no_signal),
        )
        return self.reported

    async def _in_worker(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.worker, call)


def training_loop(
    settings: LoopSettings,
    *,
    step: Step,
    objective: PolicyObjective,
    stream: Stream,
    publisher: Publisher,
    check_canary: CanaryCheck,
    replica: Replica | None = None,
    checkpoints: CheckpointStore,
    restored: TrainingState | None,
    at: Callable[[int], None] = lambda version: None,
    use_cores: Callable[[Sequence[int]], None] = lambda cores: None,
    samples: StepSamples | None = None,
) -> TrainingLoop:
    """Compose the training loop; `restored` is the state of the checkpoint with which the step's workers started."""
    metrics = DomainMetrics()

    def note_ended(groups: Sequence[RolloutGroup], outcome: GroupOutcome, why: str) -> None:
        metrics.add(groups, stale=outcome is GroupOutcome.STALE)
        if samples is not None and outcome is GroupOutcome.FILTERED:
            samples.note_filtered(groups, why)

    epochs = tuple((epoch, began_at) for epoch, began_at in restored.epochs) if restored else ()
    batcher = Batcher(
        ledger=ConsumedLedger.from_record(restored.ledger) if restored else ConsumedLedger(),
        lineage=Lineage(0, restored.model_version if restored else 0, epochs),
        solved=SolvedProblems(restored.solved if restored else None),
        doubted=[(url, epoch, version) for url, epoch, version in restored.doubted] if restored else (),
        no_signal=settings.no_signal,
        teaches=teacher(objective, step.rules),
        signal=signal_of(objective, step.rules.losses),
        vocab_size=settings.vocab_size,
        routing=settings.routing,
        ended=note_ended,
        scope=settings.scope,
    )
    reader = RolloutReader(
        stream, offsets=restored.offsets if restored else {}, frontier=lambda: batcher.ledger.frontier
    )
    link = ControllerLink(stream, reader, deadline_s=settings.deadline_s)
    worker = ThreadPoolExecutor(1, thread_name_prefix="trainer")
    return TrainingLoop(
        settings=settings,
        step=step,
        objective=AdaptiveObjective(
            objective,
            controller=settings.kl,
            restored=restored.kl_coefficient if restored else None,
            baselines=restored.baselines if restored else {},
        ),
        batcher=batcher,
        link=link,
        publishing=Publishing(
            step.policy,
            link,
            publisher,
            check_canary,
            proofs=EngineProofs(step.policy, step.policy.weight_layout(), replica),
            worker=worker,
            on_update=settings.on_update,
            timeout_s=settings.publish_timeout_s,
        ),
        checkpointing=Checkpointing(checkpoints, report=link.report, trim=reader.trim, deadline_s=settings.deadline_s),
        worker=worker,
        metrics=metrics,
        samples=samples,
        overdue=None if settings.overdue_s is None else OverdueWait(settings.overdue_s),
        at=at,
        use_cores=use_cores,
        version=batcher.lineage.began_at,
    )
