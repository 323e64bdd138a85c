"""Parts of a recipe that several processes read, as the values they stand for. Imports no array library but numpy."""

from __future__ import annotations

from pathlib import Path

from pipelinerl.config import RunConfig
from pipelinerl.controller.knobs import Knobs
from pipelinerl.errors import RecipeError
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.presets import resolve
from pipelinerl.training.checkpoint import CheckpointStore


def checkpoints_of(config: RunConfig, run_dir: Path) -> CheckpointStore:
    """The checkpoints below the run's directory."""
    return CheckpointStore(run_dir / "checkpoints", keep=config.checkpoint.keep, model_directory=config.model.resolved)


def objective_of(config: RunConfig) -> PolicyObjective:
    """The recipe's objective.

    Raises:
        RecipeError: it needs a pass that no part of the pipeline makes.
    """
    objective = resolve(config.objective)
    missing = objective.needs - {"old_logprobs"}
    if missing:
        raise RecipeError(
            f"objective needs {', '.join(sorted(missing))}, which no part of this pipeline computes yet; "
            "remove the term that needs it (for ref_logprobs, the KL penalty)"
        )
    return objective


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
        group_size=config.sampling.group_size,
        max_groups=config.streams.max_groups,
    )
