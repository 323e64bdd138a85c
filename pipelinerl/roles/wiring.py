"""Conversion of a recipe's sections to the value types that several processes use. Imports neither torch nor JAX."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipelinerl import registry, rng
from pipelinerl.component import imported
from pipelinerl.config.domains import DomainSection
from pipelinerl.config.evaluation import HeldOutSet
from pipelinerl.config.learning import ReferenceSection
from pipelinerl.config.recipe import RunConfig
from pipelinerl.config.sections import ElasticSection
from pipelinerl.controller.state.knobs import Knobs
from pipelinerl.data.mixture import Domain, Mixture
from pipelinerl.data.problems import Split, open_source
from pipelinerl.data.source import ProblemSource
from pipelinerl.enums import OldLogprobs, RoutingReplay
from pipelinerl.errors import ModelError, RecipeError
from pipelinerl.models.model_shape import replayed_routing
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.objective.adv import Credit
from pipelinerl.objective.contradictions import Setting, without_effect
from pipelinerl.objective.kl_control import kl_coefficient
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.presets import resolve
from pipelinerl.objective.reward import NormalizationScope
from pipelinerl.objective.streams import ONE_LOSS, DomainLoss, DomainLosses, Loss
from pipelinerl.objective.tokens import Policy
from pipelinerl.system.references import is_reference
from pipelinerl.training.batch import BatchRules, MiniBatching
from pipelinerl.training.checkpoints.checkpoint import CheckpointStore
from pipelinerl.training.checkpoints.copies import CheckpointCopies
from pipelinerl.training.checkpoints.manifest import Retention
from pipelinerl.training.demonstrations import DemonstrationStream
from pipelinerl.types import Quota
from trainer_contract.types import RoutingShape


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
    """Return the recipe's objective, after checking it against the other settings.

    Raises:
        RecipeError: the objective ignores or contradicts a setting, or a setting leaves one of the objective's five
            terms (slots) without effect.
    """
    objective = resolve(config.objective, max_tokens=config.sampling.max_tokens)
    for sentence in _unsupported(config, objective):
        raise RecipeError(sentence)
    for sentence in without_effect(objective, setting_of(config)):
        raise RecipeError(f"objective.{sentence}")
    return objective


def routing_of(config: RunConfig) -> RoutingShape | None:
    """Return the sizes (layers, experts, top k) of the routing that the trainer replays; None without routing replay.

    Raises:
        RecipeError: the engine does not report routing, the trainer cannot replay it, or the model has no routers.
    """
    replay = config.trainer.routing_replay
    if replay is RoutingReplay.OFF:
        return None
    setting = f'trainer.routing_replay = "{replay}"'
    if config.engine.type not in registry.ENGINES.having("reports_routing") and not is_reference(config.engine.type):
        raise RecipeError(
            f"{setting} needs an engine that reports which experts computed each token: "
            f"{' or '.join(registry.ENGINES.having('reports_routing'))}; engine.type is {config.engine.type!r}"
        )
    if config.trainer.type not in registry.TRAINERS.having("replays_routing") and not is_reference(config.trainer.type):
        raise RecipeError(f"{setting} needs trainer.type torch, got {config.trainer.type!r}")
    try:
        return replayed_routing(config.model.resolved)
    except ModelError as error:
        raise RecipeError(f"{setting}: {error}") from None


def check_truncation(config: RunConfig) -> None:
    """Raise `RecipeError` if training rollouts are truncated and an engine cannot report the policy's log-probs.

    Log-probs of the truncated distribution would make every ratio over them too small, by the probability of the tokens
    that are kept.
    """
    sampling = config.sampling
    if not (config.trained_domains and sampling.of_an_order.truncates):
        return
    for key, type in (("engine.type", config.engine.type), *(("elastic.types", each) for each in config.elastic.types)):
        if type not in registry.ENGINES.having("reports_policy") and not is_reference(type):
            raise RecipeError(
                f"sampling.top_p = {sampling.top_p:g} and top_k = {sampling.top_k} need an engine that reports "
                f"log-probs from before this truncation, as the trainer computes them, and {key} {type!r} cannot; use "
                f"{', '.join(sorted(registry.ENGINES.having('reports_policy')))}, or set top_p = 1 and top_k = 0"
            )


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
        if (
            domain.reward is not None
            and domain.reward.mean is NormalizationScope.GROUP
            and config.group_size_of(domain) == 1
        ):
            yield (
                f"domains.{domain.name}.reward.mean group needs groups, and {config.key_of_group_size(domain)} is 1: "
                'every reward would be 0; raise it, or use mean = "batch"'
            )
        if domain.reward is None or not domain.reward.shaping.rescales:
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
    read = "old_logprobs" in passes or config.training.target_kl is not None
    if config.training.old_logprobs is not OldLogprobs.RECOMPUTE and not read:
        yield "training.old_logprobs: the objective reads none; remove it"
    pair = {getattr(weight, name, None) for name in ("numerator", "denominator")}
    if config.training.old_logprobs is OldLogprobs.BEHAVIOR and pair == {Policy.OLD, Policy.BEHAVIOR}:
        yield (
            "training.old_logprobs must not be behavior with an is_weight that divides old by behavior, which would "
            "always be 1; use recompute or sampling_weights"
        )


def knobs_of(config: RunConfig) -> Knobs:
    """Return the knobs (settings that may change while the run is live) with the recipe's initial values."""
    bounds = config.staleness.bounds
    return Knobs(
        j=bounds.j,
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


def elastic_of(config: RunConfig) -> ElasticSection | None:
    """Return the rule by which engines are added and removed; None if the recipe has no `elastic.types`.

    Raises:
        RecipeError: the launcher cannot start a type of engine, or the initial number of engines is outside the limits.
    """
    for type, limits in config.elastic.types.items():
        own = registry.is_user_code(registry.ENGINES, type)
        servers = registry.ENGINES.having("drives_server")
        if not own and (type not in registry.ENGINES or type in servers):
            started = ", ".join(name for name in registry.ENGINES if name not in servers)
            raise RecipeError(
                f"elastic.types must name engines that can be started: {started}, or code of your own; got {type!r}"
            )
        count = config.engine.count
        if type == config.engine.type and not limits.min <= count <= limits.max:
            raise RecipeError(
                f"engine.count ({count}) must be within elastic.types.{type}, from {limits.min} to {limits.max}"
            )
    return config.elastic if config.elastic.types else None


def servers_of(config: RunConfig) -> tuple[str, ...]:
    """Return the URLs of the external servers, one per engine; empty for engines that run their own model.

    Raises:
        RecipeError: there are fewer servers than engines, or servers for a type of engine that uses none.
    """
    section, types = config.engine, registry.ENGINES.having("drives_server")
    if section.type not in types:
        if section.servers:
            raise RecipeError(
                f"engine.servers are for the types {' and '.join(sorted(types))}, got engine.type "
                f"{section.type}; remove them"
            )
    elif len(section.servers) < section.count:
        raise RecipeError(
            f"engine.servers must name one server for each of the {section.count} engines, got {len(section.servers)}; "
            'set engine.servers=["http://host:port"]'
        )
    return section.servers


def check_engine_options(config: RunConfig) -> None:
    """Check the names in `engine.options`; the engine itself checks whether the installed library has these options.

    Raises:
        RecipeError: the engine's type takes no options, or the recipe already sets one of them in another key.
    """
    options, chosen = config.engine.options, config.engine.type
    if not options:
        return
    component = registry.ENGINES.get(chosen)
    if component is None:
        return  # the user's engine checks its own options
    if component.drives_server:
        raise RecipeError(
            f"engine.options {', '.join(options)} would not reach a server that runs already; start the server with "
            "them, and remove them here"
        )
    if not component.check_options:
        raise RecipeError(f"engine.type {chosen!r} takes no options, got {', '.join(options)}; remove them")
    imported(component.check_options)(options)


def training_problems(config: RunConfig) -> Mixture:
    """Return the problems to train on. The problem with index i depends only on the seed, the mixture and i."""
    return problems_of(config, Split.TRAIN, seed=config.run.seed)


def problems_of(config: RunConfig, split: Split, *, seed: int) -> Mixture:
    """Return one split's problems, shuffled by `seed` and mixed so that each step has all domains' shares of groups."""
    domains = [
        Domain(name=each.name, weight=each.weight, source=_source_of(each, split, seed=seed))
        for each in config.trained_domains
    ]
    return Mixture(domains, seed=seed, quota=Quota(0, config.groups_per_step))


def demonstrations_of(config: RunConfig) -> DemonstrationStream | None:
    """Return the right answers to train on in addition to rollouts; None if no domain has the loss `ce`."""
    if not (count := config.demonstrations_per_update):
        return None
    return DemonstrationStream(
        problems=demonstrated_problems(config, Split.TRAIN, count=count),
        tokenizer=ChatTokenizer.load(config.model.resolved),
        count=count,
        most_tokens=config.engine.context_length,
    )


def demonstrated_problems(config: RunConfig, split: Split, *, count: int) -> Mixture:
    """Return the problems whose right answers are trained on, in another order than the problems that are sampled.

    The problems come from the domains with the loss `ce`, or from all trained domains if no domain has this loss. Each
    `count` problems in sequence are divided over the domains by weight.
    """
    seed = rng.key(config.run.seed, "demonstrations") % 2**31
    chosen = config.demonstrated_domains or config.trained_domains
    domains = [Domain(name=each.name, weight=each.weight, source=_source_of(each, split, seed=seed)) for each in chosen]
    return Mixture(domains, seed=seed, quota=Quota(0, count))


def held_out_problems(config: RunConfig, *sets: HeldOutSet) -> dict[str, Mixture]:
    """Return the problems, never trained on, of these evaluation sets (by default all); keys are names of sets.

    The problems do not depend on the run's seed, so that runs can be compared. Data of several sets is opened once.
    """
    opened: dict[tuple[str, str], ProblemSource] = {}
    mixtures: dict[str, Mixture] = {}
    for held_out in sets or config.evaluation_sets:
        domains = [domain for domain in config.domains if domain.name in held_out.domains]
        for domain in domains:
            if (domain.name, held_out.split) not in opened:
                opened[domain.name, held_out.split] = _source_of(domain, Split(held_out.split), seed=0)
        # The domains' shares hold for the first n problems, for any n: smaller evaluations are prefixes of larger ones.
        mixtures[held_out.name] = Mixture(
            [
                Domain(name=each.name, weight=each.weight or 1.0, source=opened[each.name, held_out.split])
                for each in domains
            ],
            seed=0,
            quota=Quota(0, 1),
        )
    return mixtures


def _source_of(domain: DomainSection, split: Split, *, seed: int) -> ProblemSource:
    return open_source(
        domain.source,
        domain=domain.name,
        split=split,
        seed=seed,
        parameters=domain.parameters,
        prompts=domain.prompts,
    )
