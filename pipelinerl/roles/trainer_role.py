"""The trainer's process: builds the workers (models), the training loop, the weight publisher and the checkpoints."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from inference_contract.schemas import ChatMessage
from inference_contract.weights import OnUpdate
from pipelinerl import registry
from pipelinerl.component import imported
from pipelinerl.config.recipe import RunConfig
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.enums import NoSignal, Overdue, RoutingReplay, StalenessScope, WeightFormat
from pipelinerl.errors import CheckpointError
from pipelinerl.models.checkpoint import vocab_size
from pipelinerl.models.model_shape import mixture_of
from pipelinerl.models.tokenizer import decoder_of
from pipelinerl.objective.kl_control import KLController
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.presets import no_signal_of
from pipelinerl.roles.dtypes import dtypes_of, on_accelerator
from pipelinerl.roles.engine_rules import options_of, routing_of
from pipelinerl.roles.problems import training_problems
from pipelinerl.roles.process import Identity, freeze_gc
from pipelinerl.roles.wiring import checkpoints_of, objective_of
from pipelinerl.roles.workers import close_workers, started
from pipelinerl.streams.stream import Stream
from pipelinerl.trainers.ranks.rank0 import leave_undone
from pipelinerl.training.canary_check import ROUTED_APART, TOLERANCES, Canary, CanaryCheck, check_canary
from pipelinerl.training.checkpoints.checkpoint import Checkpointing, CheckpointStore
from pipelinerl.training.checkpoints.manifest import TrainingState
from pipelinerl.training.domain_metrics import DomainMetrics
from pipelinerl.training.engine_proofs import EngineProofs, Replica
from pipelinerl.training.loop import TrainingLoop
from pipelinerl.training.publishing import Publishing
from pipelinerl.training.rollouts.admission import (
    ConsumedLedger,
    GroupOutcome,
    Lineage,
    SolvedProblems,
    signal_of,
    teacher,
)
from pipelinerl.training.rollouts.batcher import Batcher, OverdueWait
from pipelinerl.training.rollouts.rollout_reader import ControllerLink, RolloutReader
from pipelinerl.training.schedule import AdaptiveObjective, LearningRateSchedule
from pipelinerl.training.step import Step
from pipelinerl.training.step_samples import StepSamples
from pipelinerl.types import RolloutGroup
from pipelinerl.weights.engine_control import EngineControl
from pipelinerl.weights.grace import Grace
from pipelinerl.weights.publisher import Publisher
from trainer_contract.host_weights import num_bytes
from trainer_contract.types import Device, ParameterInfo, Precision, RoutingShape, WeightDType

log = logging.getLogger("pipelinerl")

T = TypeVar("T")
#: How often a trainer loads the newest checkpoint if another trainer removes it meanwhile.
_STARTS: Final = 5
#: The largest model, in bytes as it is sent, of which the trainer loads a replica of the engines.
_MOST_REPLICATED: Final = 2**30


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


async def run(identity: Identity) -> None:
    """Train until the controller stops the run; after SIGTERM, save the state for a restart here or elsewhere."""
    config = identity.config
    process_log = identity.log()
    objective = objective_of(config)
    checkpoints = checkpoints_of(config, identity.run_dir)
    restored, step = from_newest(
        checkpoints,
        lambda checkpoint, version: started(config, objective, checkpoint=checkpoint, version=version),
        attempts=1 if config.trainer_processes > 1 else _STARTS,  # several processes start again together
    )
    checkpoints.prepare(step.policy.weight_layout())
    stream = await identity.stream()
    client = EngineClient(token=identity.token)
    samples, grace = samples_of(identity), Grace()
    loop = training_loop(
        loop_settings(config),
        step=step,
        objective=objective,
        stream=stream,
        publisher=publisher_of(identity, client, stream, grace),
        check_canary=partial(check_canary, canary_of(config), client, grace),
        replica=replica_of(config, step.policy.weight_layout()),
        checkpoints=checkpoints,
        restored=restored,
        at=lambda version: process_log.at(step=version, model_version=version),
        samples=samples,
    )
    freeze_gc()
    notice = SigtermHandler(loop, save_s=config.launch.save_s)
    try:
        await loop.run()
        if notice.was_given:
            raise asyncio.CancelledError  # a normal return would mean that the work is done
    except BaseException:
        leave_undone()
        raise
    finally:
        await loop.close()
        if samples is not None:
            samples.log.close()
        await client.close()
        await stream.close()
        close_workers(step)


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
        step=step,
        objective=AdaptiveObjective(
            objective,
            controller=settings.kl,
            restored=restored.kl_coefficient if restored else None,
            baselines=restored.baselines if restored else {},
        ),
        schedule=settings.schedule,
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
        tokens_per_step=settings.tokens_per_step,
        overdue=None if settings.overdue_s is None else OverdueWait(settings.overdue_s),
        at=at,
    )


def from_newest(
    checkpoints: CheckpointStore, start: Callable[[Path | None, int], T], *, attempts: int = _STARTS
) -> tuple[TrainingState | None, T]:
    """Call `start` with the newest checkpoint and its version, or (None, 0); return its state and the result.

    If a trainer that is still alive removes the checkpoint meanwhile, the next newest is taken.

    Raises CheckpointError if this happens in each of `attempts` attempts, and otherwise the errors of `start`.
    """
    while True:
        latest, attempts = checkpoints.latest(), attempts - 1
        try:
            if latest is None:
                return None, start(None, 0)
            return latest[1], start(latest[0], latest[1].model_version)
        except Exception as error:  # whatever a library raises for files that vanish
            if latest is None or latest[0].is_dir():
                raise
            removed = f"{latest[0]} was removed while this trainer loaded it, since another trainer of the run is alive"
            if not attempts:
                raise CheckpointError(f"{removed}; start this trainer again, and it loads the newest one") from error
            log.warning("%s; loading the newest one", removed)


class SigtermHandler:
    """Gives the trainer `save_s` after a first SIGTERM to save its state; a second SIGTERM cancels the trainer."""

    def __init__(self, training: TrainingLoop, *, save_s: float) -> None:
        self.was_given = False
        self._training = training
        self._save_s = save_s
        self._task = asyncio.current_task()
        self._events = asyncio.get_running_loop()
        self._events.add_signal_handler(signal.SIGTERM, self._give)

    def _give(self) -> None:
        assert self._task is not None
        if self.was_given:
            self._task.cancel()
            return
        log.info("stopping: saving the state first, within %g s", self._save_s)
        self.was_given = True
        self._training.leave()
        self._events.call_later(self._save_s, self._task.cancel)


def publisher_of(identity: Identity, control: EngineControl, stream: Stream, grace: Grace) -> Publisher:
    """Return the publisher for the recipe's transport; `stream` announces versions to engines that pull them.

    Raises:
        RecipeError: weights are pulled without a parameter server, or broadcast by a backend that torch lacks.
    """
    transport = identity.config.weights.transport
    publisher: Publisher = registry.load("weights.transport", registry.TRANSPORTS, transport)(
        identity, control, stream, grace
    )
    return publisher


def canary_of(config: RunConfig) -> Canary:
    """Return the canary: the first training problem, as a prompt whose log-probs show if an engine's weights are right.

    The tolerated difference follows from the least precise dtype that weights pass through from trainer to engine.
    """
    problem = training_problems(config).problem(0)
    replay, coarsest = config.trainer.routing_replay, dtypes_of(config).coarsest(config)
    routed_apart = replay is RoutingReplay.OFF and mixture_of(config.model.resolved) is not None
    return Canary(
        messages=tuple(ChatMessage.model_construct(role=m.role, content=m.content) for m in problem.messages),
        context_length=config.engine.context_length,
        tolerance=ROUTED_APART if routed_apart and coarsest == "float32" else TOLERANCES[coarsest],
        temperature=config.sampling.temperature or 1.0,
        routing_replay=replay,
    )


def replica_of(config: RunConfig, layout: Sequence[ParameterInfo]) -> Replica | None:
    """Return a replica of the run's engines; None if they compute as the trainer does, on a GPU, or a large model."""
    section, dtypes = config.engine, dtypes_of(config)
    computes = WeightDType.FLOAT32 if config.trainer.passes_in is Precision.FP32 else WeightDType.BFLOAT16
    is_alike = dtypes.engine is computes and section.weights is WeightFormat.NATIVE
    if is_alike or section.type not in registry.ENGINES.having("replica") or on_accelerator(section.device):
        return None
    if sum(map(num_bytes, layout)) > _MOST_REPLICATED:
        return None
    options = replace(options_of(config), device=Device.CPU, threads=None)
    replica: Replica = imported(registry.ENGINES[section.type].replica)(options)
    return replica


def samples_of(identity: Identity) -> StepSamples | None:
    """Return the recorder of samples from training steps; None if the recipe keeps no samples."""
    config, log = identity.config, identity.sample_log("training")
    if log is None:
        return None
    decode, most = decoder_of(config.model.resolved), config.samples.groups_per_step
    return StepSamples(log, decode, seed=config.run.seed, groups_per_step=most)


def loop_settings(config: RunConfig) -> LoopSettings:
    """Return the settings in the recipe that the training loop uses."""
    return LoopSettings(
        no_signal=config.training.no_signal or no_signal_of(config.objective),
        deadline_s=config.training.deadline_s,
        tokens_per_step=config.training.tokens_per_step,
        kl=config.kl_control.controller if config.kl_control else None,
        on_update=config.engine.on_update,
        vocab_size=vocab_size(config.model.resolved),
        routing=routing_of(config),
        publish_timeout_s=config.weights.timeout_s,
        scope=config.staleness.scope,
        overdue_s=config.staleness.overdue_s if config.staleness.overdue is Overdue.WAIT else None,
        schedule=LearningRateSchedule(
            warmup_steps=config.optimizer.warmup_steps,
            steps=config.optimizer_steps,
            shape=config.optimizer.schedule,
            final_fraction=config.optimizer.final_fraction,
        ),
    )
