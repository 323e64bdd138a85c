"""The models in the trainer's process: the policy, and the critic and reference if the objective needs them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from pipelinerl import registry
from pipelinerl.config.learning import CriticSection
from pipelinerl.config.recipe import RunConfig
from pipelinerl.config.sections import ModelSection
from pipelinerl.engines.http.engine_teacher import TEACHER_TOKEN, EngineTeacher
from pipelinerl.enums import OldLogprobs
from pipelinerl.errors import ModelError, RecipeError
from pipelinerl.models.checkpoint import model_dtype
from pipelinerl.models.vocabulary import refuse_other_vocabulary
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.value_loss import ValueLoss
from pipelinerl.roles.dtypes import sent_in
from pipelinerl.roles.problems import demonstrations_of
from pipelinerl.roles.wiring import batch_rules_of, is_url, references_of
from pipelinerl.system.secret_variables import read_secret
from pipelinerl.training.passes import EntropyMeter, ForwardPasses, Teacher
from pipelinerl.training.schedule import LearningRateSchedule
from pipelinerl.training.step import Critic, Step
from pipelinerl.training.weight_history import WeightHistory
from trainer_contract.errors import SpecError, StateError
from trainer_contract.trainer import Trainer
from trainer_contract.types import Head, TrainerSpec, WeightDType


def close_workers(step: Step) -> None:
    """Close every worker of a training step, which frees its memory."""
    passes = step.passes
    frozen = {id(teacher): teacher for teacher in (passes.reference, *passes.teachers.values())}
    for worker in (passes.policy, passes.critic, *frozen.values()):
        if worker is not None:
            worker.close()


def opened_policy(config: RunConfig) -> Trainer:
    """Start only the policy, set to send its weights in the model's dtype; raise `ModelError` if it cannot start."""
    return _worker(config, "trainer", replace(spec_of(config, restore_from=None), gather_dtype=None))


def started(config: RunConfig, objective: PolicyObjective, *, checkpoint: Path | None, version: int = 0) -> Step:
    """Start the workers (models) that the objective needs, from `checkpoint` of `version`; return the training step.

    The reference never comes from a checkpoint: it is the policy before the first step.

    Raises:
        ModelError: a model, a device or the value head is not available; the message names the worker.
        RecipeError: the checkpoint belongs to another recipe: a worker's state is missing or of another model.
    """
    policy = _worker(config, "trainer", spec_of(config, restore_from=checkpoint and checkpoint / "trainer"))
    critic = None
    if "values" in objective.passes:
        section = config.critic or CriticSection()
        spec = replace(
            spec_of(config, restore_from=checkpoint and checkpoint / "critic"),
            head=Head.VALUE,
            model_path=_model(config, section.path),
        )
        critic = Critic(
            worker=_worker(config, "critic", spec),
            loss=ValueLoss(clip=section.clip),
            learning_rate=section.learning_rate or config.optimizer.learning_rate,
            schedule=LearningRateSchedule(
                warmup_steps=section.rate_warmup_steps,
                steps=config.optimizer_steps,
                shape=section.schedule,
                final_fraction=section.final_fraction,
            ),
            warmup_steps=section.warmup_steps,
        )
    history = None
    if config.training.old_logprobs is OldLogprobs.SAMPLING_WEIGHTS:  # the current weights, and those of the checkpoint
        layout = policy.weight_layout()
        history = WeightHistory.restored(checkpoint / "history", layout) if checkpoint else WeightHistory(layout)
        history.keep(policy, version=version, acceptance=math.inf)
    places = references_of(config, objective)
    frozen = {place: _frozen(config, place) for place in dict.fromkeys(places.values())}
    passes = ForwardPasses(
        policy=policy,
        critic=critic.worker if critic else None,
        reference=frozen[places[None]] if None in places else None,
        teachers={domain: frozen[place] for domain, place in places.items() if domain is not None},
        old_logprobs=config.training.old_logprobs,
        history=history,
    )
    return Step(
        rules=batch_rules_of(config, width=policy.width),
        passes=passes,
        critic=critic,
        entropy=EntropyMeter(
            interval_steps=config.figures.interval(config.trainer.type),
            seed=config.run.seed,
            logged_groups=config.samples.groups_per_step if config.samples.log == "on" else 0,
        ),
        demonstrations=demonstrations_of(config),
    )


def _frozen(config: RunConfig, place: str) -> Teacher:
    if is_url(place):
        return EngineTeacher(place, token=read_secret(TEACHER_TOKEN))
    spec = replace(spec_of(config, restore_from=None), model_path=_model(config, place or None))
    try:
        own = model_dtype(spec.model_path)
    except ModelError as error:
        raise ModelError(f"reference: {error}") from error
    # Rounding to the model's own dtype would not change a frozen model, so make no rounded copy of the weights.
    if spec.gather_dtype in (None, own):
        spec = replace(spec, gather_dtype=WeightDType.FLOAT32)
    return _worker(config, "reference", spec)


def spec_of(config: RunConfig, *, restore_from: Path | None) -> TrainerSpec:
    """Return the policy's `TrainerSpec` from the recipe."""
    return TrainerSpec(
        precision=config.trainer.passes_in,
        device=config.trainer.device,
        gradient_checkpointing=config.trainer.gradient_checkpointing,
        options=config.trainer.options,
        memory_share=config.trainer.memory_share,
        model_path=config.model.resolved,
        seed=config.run.seed,
        head_precision=config.model.head_precision,
        kernels=config.model.kernels,
        gather_dtype=sent_in(config),
        rounding=config.weights.rounding,
        optimizer=config.optimizer.spec,
        restore_from=restore_from,
    )


def _model(config: RunConfig, path: str | None) -> Path:
    return config.model.resolved if path is None else ModelSection(path=path).resolved


def _worker(config: RunConfig, name: str, spec: TrainerSpec) -> Trainer:
    worker: Trainer = registry.load("trainer.type", registry.TRAINERS, config.trainer.type)()
    try:
        worker.init_worker(spec)
        refuse_other_vocabulary(config.model.resolved, spec.model_path)
    except (SpecError, ModelError) as error:
        raise ModelError(f"{name}: {error}") from error
    except StateError as error:
        # The checkpoint's files are undamaged, since their digests match, so the recipe does not fit the checkpoint.
        state = spec.restore_from
        if spec.head is Head.VALUE and state is not None and not state.is_dir():
            raise RecipeError(
                f"objective: it needs a {name}, and the checkpoint {state.parent} has none, because the run used none; "
                f"resume with its objective, or start another run from the model in {state.parent}"
            ) from error
        raise RecipeError(
            f"trainer.type, model.path: the {name}'s state in the checkpoint belongs to others ({error}); resume with "
            "those of the run, or start another run"
        ) from error
    return worker
