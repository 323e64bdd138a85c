"""The problems of a recipe: to train on, to imitate, and held out for evaluations."""

from __future__ import annotations

from pipelinerl import rng
from pipelinerl.config.domains import DomainSection
from pipelinerl.config.evaluation import EvaluationSet
from pipelinerl.config.recipe import RunConfig
from pipelinerl.data.mixture import Domain, Mixture
from pipelinerl.data.problems import Split, open_source
from pipelinerl.data.source import ProblemSource
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.training.demonstrations import DemonstrationStream
from pipelinerl.types import Quota


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


def held_out_problems(config: RunConfig, *sets: EvaluationSet) -> dict[str, Mixture]:
    """Return the problems of these evaluation sets (by default all), by name; they do not depend on the seed."""
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
        domain.source, domain=domain.name, split=split, seed=seed, parameters=domain.parameters, prompts=domain.prompts
    )
