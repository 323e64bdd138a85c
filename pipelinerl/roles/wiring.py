"""Conversion of a recipe's sections to the value types that several processes use. Imports neither torch nor JAX."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipelinerl.config.learning import ReferenceSection
from pipelinerl.config.recipe import RunConfig
from pipelinerl.controller.state.knobs import Knobs
from pipelinerl.enums import OldLogprobs
from pipelinerl.errors import RecipeError
from pipelinerl.objective.adv import Credit
from pipelinerl.objective.contradictions import Setting
from pipelinerl.objective.kl_control import kl_coefficient
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.presets import resolve
from pipelinerl.objective.reward import NormalizationScope
from pipelinerl.objective.streams import ONE_LOSS, DomainLoss, DomainLosses, Loss
from pipelinerl.objective.tokens import Policy
from pipelinerl.training.batch import BatchRules, MiniBatching
from pipelinerl.training.checkpoints.checkpoint import CheckpointStore
from pipelinerl.training.checkpoints.copies import CheckpointCopies
from pipelinerl.training.checkpoints.manifest import Retention


def checkpoints_of(config: RunConfig, run_dir: Path) -> CheckpointStore:
    """Return the store of the run directory's checkpoints, which also copies them to the recipe's location, if any."""
    return CheckpointStore(
        run_dir / "checkpoints",
        keep=config.checkpoint.keep,
        keep_best=config.checkpoint.keep_best,
        model_directory=config.model.resolved,
        copies=copies_of(config, run_dir),
    )


def copies_of(config: RunConfig, run_dir: Path) -> CheckpointCopies | None:
    """Return the store of the copies of the run's checkpoints; None if the recipe names no location."""
    url = config.checkpoint.url_of(config.run.name)
    if url is None:
        return None
    retention = Retention(config.checkpoint.keep, config.checkpoint.keep_best)
    return CheckpointCopies(url, retention=retention, run_files=(run_dir / "recipe.toml", run_dir / "events.jsonl"))


def objective_of(config: RunConfig) -> PolicyObjective:
    """Return the recipe's objective; `RecipeError` if it contradicts a setting, or one leaves a term without effect."""
    objective = resolve(config.objective, max_tokens=config.sampling.max_tokens)
    for sentence in _unsupported(config, objective):
        raise RecipeError(sentence)
    for key, size in setting_of(config).group_sizes.items():
        for sentence in objective.adv.without_effect(key, size):
            raise RecipeError(f"objective.{sentence}")
    return objective


def batch_rules_of(config: RunConfig, *, width: int) -> BatchRules:
    """Return how groups become batches for a trainer that computes `width` micro-batches at once."""
    training = config.training
    return BatchRules(
        token_budget=config.trainer.token_budget,
        width=width,
        shaping={domain.name: how for domain in config.domains if (how := domain.shaping) is not None},
        truncated=training.truncated,
        losses=losses_of(config),
        mini_batching=MiniBatching(
            epochs=training.epochs,
            mini_batches=training.mini_batches,
            target_kl=training.target_kl,
            seed=config.run.seed,
        ),
    )


def losses_of(config: RunConfig) -> DomainLosses:
    """Return, for each trained domain, its loss and the factor by which the loss is weighted."""
    losses = {each.name: DomainLoss(each.loss, each.loss_weight) for each in config.domains if each.weight}
    return DomainLosses(losses) if any(each != DomainLoss() for each in losses.values()) else ONE_LOSS


def is_url(place: str) -> bool:
    """Return True if a reference or teacher is an engine's URL, not a model directory."""
    return place.startswith(("http://", "https://"))


def references_of(config: RunConfig, objective: PolicyObjective) -> dict[str | None, str]:
    """Return where each frozen model is: a path, the URL of an engine, or empty for the initial policy.

    Keys are names of domains with a teacher of their own, and None for the objective's reference model. The reference
    is also the teacher of the other domains that distill (`loss = "ref_kl"`).
    """
    taught = [domain for domain in config.trained_domains if domain.loss is Loss.REF_KL]
    places: dict[str | None, str] = {domain.name: domain.teacher for domain in taught if domain.teacher}
    if "ref_logprobs" in objective.passes or len(places) < len(taught):
        places[None] = (config.reference or ReferenceSection()).place
    return places


def setting_of(config: RunConfig) -> Setting:
    """Return the settings of this run that decide whether each of the objective's five terms (slots) has an effect."""
    recomputed = config.training.old_logprobs is OldLogprobs.RECOMPUTE
    return Setting(
        group_sizes={
            config.key_of_group_size(each): config.group_size_of(each)
            for each in config.trained_domains
            if each.loss is Loss.RL
        },
        max_tokens=config.sampling.max_tokens,
        step_begins_at=frozenset({Policy.OLD} if recomputed else ()),
        updates=config.training.epochs * config.training.mini_batches,
    )


def _unsupported(config: RunConfig, objective: PolicyObjective) -> Iterator[str]:
    passes, weight = objective.passes, objective.is_weight
    for domain in config.domains:
        if domain.reward is None:
            continue
        if domain.reward.mean is NormalizationScope.GROUP and config.group_size_of(domain) == 1:
            yield (
                f"domains.{domain.name}.reward.mean group needs groups, and {config.key_of_group_size(domain)} is 1: "
                'every reward would be 0; raise it, or use mean = "batch"'
            )
        if not domain.reward.shaping.rescales:
            continue
        changes = f"domains.{domain.name}.reward: mean, std, low, high and scale change a rollout's reward and not"
        if objective.adv.state and domain.has_environment:
            yield f'{changes} the rewards of its turns, which objective.adv = "role_baseline" reads; leave them out'
        elif objective.adv.credit is Credit.TURNS and not objective.adv.state:
            yield (
                f'{changes} the rewards of its turns, which objective.adv.credit = "turns" reads; leave them out, or '
                'take "episode"'
            )
        if objective.adv.needs_parts and domain.rewards:
            yield (
                f'{changes} its parts, which objective.adv = "decoupled" reads; leave them out, or take '
                '"group_relative"'
            )
    if config.critic is not None and "values" not in passes:
        yield "critic: the objective reads no values; remove the section, or take an objective such as ppo"
    if config.reference is not None and None not in references_of(config, objective):
        yield (
            'reference: the objective reads no ref_logprobs; remove the section, or set objective.grad2 = "kl" or a '
            'domain\'s loss = "ref_kl"'
        )
    if config.kl_control is not None and kl_coefficient(objective) is None:
        yield 'kl_control: the objective has no KL term to control; remove the section, or set objective.grad2 = "kl"'
    source, staleness = config.training.old_logprobs, config.staleness
    read = "old_logprobs" in passes or config.training.target_kl is not None
    if source is not OldLogprobs.RECOMPUTE and not read:
        yield "training.old_logprobs: the objective reads none; remove it"
    if source is OldLogprobs.SAMPLING_WEIGHTS and staleness.k is None and staleness.auto_j:
        yield (
            "staleness.k must be given with training.old_logprobs = sampling_weights, since the weights of the last k "
            "versions are kept; 8 is usual"
        )
    pair = {getattr(weight, name, None) for name in ("numerator", "denominator")}
    if source is OldLogprobs.BEHAVIOR and pair == {Policy.OLD, Policy.BEHAVIOR}:
        yield (
            "training.old_logprobs must not be behavior with an is_weight that divides old by behavior, which would "
            "always be 1; use recompute or sampling_weights"
        )


def knobs_of(config: RunConfig) -> Knobs:
    """Return the knobs (settings that may change while the run is live) with the recipe's initial values."""
    bounds = config.staleness.bounds
    return Knobs(
        j=None if config.staleness.auto_j else bounds.j,
        k=bounds.k,
        temperature=config.sampling.temperature,
        learning_rate=config.optimizer.learning_rate,
        rollouts_per_step=config.training.rollouts_per_step,
        evaluation_interval_steps=config.evaluation.interval_steps,
        groups_in_flight=config.groups_in_flight,
        domain_weights={domain.name: domain.weight for domain in config.trained_domains},
        group_sizes={domain.name: config.group_size_of(domain) for domain in config.trained_domains},
        engines_min={type: limits.min for type, limits in config.elastic.types.items()},
        engines_max={type: limits.max for type, limits in config.elastic.types.items()},
        max_groups=config.streams.max_groups,
        k_finite=config.training.old_logprobs is OldLogprobs.SAMPLING_WEIGHTS,
    )
