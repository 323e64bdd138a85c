"""Parts of a recipe that several processes read, as the values they stand for. Imports no array library but numpy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipelinerl import registry
from pipelinerl.config import RunConfig
from pipelinerl.controller.knobs import Knobs
from pipelinerl.errors import RecipeError
from pipelinerl.objective.kl_control import kl_coefficient
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.presets import resolve
from pipelinerl.objective.tokens import Policy
from pipelinerl.training.checkpoint import CheckpointStore
from pipelinerl.training.passes import OldLogprobs


def checkpoints_of(config: RunConfig, run_dir: Path) -> CheckpointStore:
    """The checkpoints below the run's directory."""
    return CheckpointStore(run_dir / "checkpoints", keep=config.checkpoint.keep, model_directory=config.model.resolved)


def objective_of(config: RunConfig) -> PolicyObjective:
    """The recipe's objective, whose passes have somebody to make them.

    Raises:
        RecipeError: the trainer cannot make a pass; or a section is given for a pass that the objective does not need.
    """
    objective = resolve(config.objective)
    for sentence in _unsupported(config, objective):
        raise RecipeError(sentence)
    return objective


def _unsupported(config: RunConfig, objective: PolicyObjective) -> Iterator[str]:
    passes, weight = objective.passes, objective.is_weight
    if "values" in passes and config.trainer.type not in registry.VALUE_HEADS:
        yield (
            f"objective needs a critic, and trainer.type {config.trainer.type!r} has no value head; "
            f"use {' or '.join(sorted(registry.VALUE_HEADS))}"
        )
    if config.critic is not None and "values" not in passes:
        yield "critic: the objective reads no values; remove the section, or take an objective such as ppo"
    if config.reference is not None and "ref_logprobs" not in passes:
        yield 'reference: the objective reads no ref_logprobs; remove the section, or set objective.grad2 = "kl"'
    if config.kl_control is not None and kl_coefficient(objective) is None:
        yield 'kl_control: the objective has no KL term to control; remove the section, or set objective.grad2 = "kl"'
    if config.training.old_logprobs is OldLogprobs.BEHAVIOR:
        if "old_logprobs" not in passes:
            yield "training.old_logprobs: the objective reads none; leave it out"
        if {getattr(weight, name, None) for name in ("numerator", "denominator")} == {Policy.OLD, Policy.BEHAVIOR}:
            yield (
                "training.old_logprobs must not be behavior beside is_weight, which divides old by behavior and would "
                "always be 1; take recompute"
            )


def knobs_of(config: RunConfig) -> Knobs:
    """The knobs as the recipe sets them."""
    bounds = config.staleness.bounds
    return Knobs(
        j=bounds.j,
        k=bounds.k,
        temperature=config.sampling.temperature,
        learning_rate=config.optimizer.learning_rate,
        rollouts_per_step=config.training.rollouts_per_step,
        evaluation_interval_steps=config.evaluation.interval_steps,
        groups_in_flight=config.actor.groups_in_flight,
        domain_weights={domain.name: domain.weight for domain in config.domains},
        group_size=config.sampling.group_size,
        max_groups=config.streams.max_groups,
    )
