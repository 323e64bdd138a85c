"""Opens what judges a domain's answers: a registered verifier, user code, a weighted sum of them, or episodes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from pipelinerl import registry
from pipelinerl.actor.group_maker import EpisodeMaker, Sampler
from pipelinerl.component import Component, imported
from pipelinerl.config.domains import DomainSection
from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import RecipeError
from pipelinerl.system.references import is_reference
from pipelinerl.verifiers.group_filter import GroupFilter
from pipelinerl.verifiers.user_code import open_user_code
from pipelinerl.verifiers.verifier import BudgetShare, GroupVerifier, VerifierContext, WeightedPart, WeightedSum


def open_verifier(domain: DomainSection, *, budget: BudgetShare | None = None) -> GroupVerifier:
    """Open the verifier of a domain that has one; the caller closes it.

    The verifier's processes start at `verifier.start` or, without that call, at the first answer. `budget` is this
    process's share of what the run may spend on judging.

    Raises:
        RecipeError: a name is unknown, or user code cannot be loaded or called.
    """
    opened = {where: _open(domain, where, name, budget) for where, name in domain.verifiers}
    if not domain.rewards:
        return next(iter(opened.values()))
    parts = [
        WeightedPart(section.shown_as, section.weight, verifier)
        for section, verifier in zip(domain.rewards, opened.values(), strict=True)
    ]
    return WeightedSum(parts, correct_at=domain.correct_at)


def open_episodes(config: RunConfig, sampler: Sampler, verifiers: Mapping[str, GroupVerifier]) -> EpisodeMaker | None:
    """Return the maker of the episodes of all domains with an environment, which the caller closes; None without any.

    Raises `RecipeError` if the plug-in is missing, or an environment or a tool cannot be loaded.
    """
    if not any(domain.has_environment for domain in config.domains):
        return None
    maker: EpisodeMaker = imported(registry.GROUPS["episodes"].build)(config, sampler, verifiers)
    return maker


def rules_of(domain: DomainSection) -> str:
    """Return a digest of the rules that judge the domain's answers; a user's file counts by its content."""
    texts = []
    for _, name in domain.verifiers:
        file = Path(name.rpartition(":")[0])
        if registry.is_user_code(registry.VERIFIERS, name) and file.suffix == ".py" and file.is_file():
            name = f"{file.name}:{name.rpartition(':')[2]}:{hashlib.sha256(file.read_bytes()).hexdigest()}"
        texts.append(name)
    judging = {
        "correct_at": domain.correct_at,
        "options": {
            name: options.model_dump(mode="json", exclude=set(component.places))
            for name, component, options in domain.registered_verifiers
            if options is not None
        },
        "rewards": [[part.name, part.weight] for part in domain.rewards],
        "code": texts,
    }
    return hashlib.sha256(json.dumps(judging, sort_keys=True).encode()).hexdigest()[:32]


def open_filter(config: RunConfig) -> GroupFilter | None:
    """Open the recipe's group filter, if any; the caller closes it. Raise `RecipeError` if it cannot be loaded."""
    section = config.curation
    if section.filter is None:
        return None
    if not is_reference(section.filter):
        raise RecipeError(
            f"curation.filter must be path.py:function or package.module:function, got {section.filter!r}"
        )
    return GroupFilter(section.filter, deadline_s=section.filter_timeout_s)


def user_code(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the recipe's key and the reference (`path.py:name`) of each piece of user code."""
    chosen: tuple[tuple[str, Mapping[str, Component], str], ...] = (
        ("engine.type", registry.ENGINES, config.engine.type),
        ("trainer.type", registry.TRAINERS, config.trainer.type),
        *(("elastic.types", registry.ENGINES, type) for type in config.elastic.types if type != config.engine.type),
    )
    for where, entries, name in chosen:
        if registry.is_user_code(entries, name):
            yield where, name
    if config.curation.filter is not None:
        yield "curation.filter", config.curation.filter
    for domain in config.domains:
        if domain.environment is not None and not domain.is_hosted:
            yield f"domains.{domain.name}.environment", domain.environment
        if domain.source.partition(":")[0] not in registry.SOURCES:
            yield f"domains.{domain.name}.source", domain.source
        for where, name in domain.verifiers:
            if registry.is_user_code(registry.VERIFIERS, name):
                yield where, name


def _open(domain: DomainSection, where: str, name: str, budget: BudgetShare | None) -> GroupVerifier:
    thing = registry.load(where, registry.VERIFIERS, name)
    context = VerifierContext(
        domain=domain.name,
        correct_at=domain.correct_at,
        deadline_s=domain.verifier_timeout_s,
        workers=domain.verifier_workers,
        budget=budget,
    )
    if name not in registry.VERIFIERS:
        return open_user_code(where, name, thing, context)
    verifier: GroupVerifier = thing(domain.options_of(name, registry.VERIFIERS[name]), context)
    return verifier
