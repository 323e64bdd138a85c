"""What judges a domain's answers, by its section of the recipe: a registered verifier, a user's code, or a sum."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pipelinerl import registry
from pipelinerl.config.domains import DomainSection
from pipelinerl.config.recipe import RunConfig
from pipelinerl.config.verification import DEFAULT_VERIFIER
from pipelinerl.errors import RecipeError
from pipelinerl.roles.judging import JudgeBudget, open_judge
from pipelinerl.system.references import is_reference
from pipelinerl.verifiers.group_filter import GroupFilter
from pipelinerl.verifiers.service.served_domain import ServedDomain
from pipelinerl.verifiers.user_code import AsyncReward, PooledReward, RewardFunction, Shielded
from pipelinerl.verifiers.verifier import GroupVerifier, PerAnswerVerifier
from pipelinerl.verifiers.weighted import WeightedPart, WeightedSum

#: Verifiers that keep their deadlines themselves, in processes of their own.
_POOLED: Final = frozenset({"math_answer", "reasoning_gym"})
#: Verifiers that say the same of the same answer each time. Whether a user's code does, nobody knows.
_DETERMINISTIC: Final = _POOLED | {"instruction_following", "oubliette"}
#: Keys of a domain on which its verdicts depend, beside the code.
_JUDGING: Final = {"correct_at", "instructions", "judge", "oubliette"}
#: Keys of a domain's `oubliette` that say where programs run, and not how they are judged.
_PLACES: Final = {"url", "key_variable", "repository"}


def open_verifier(domain: DomainSection, *, purse: JudgeBudget | None = None) -> GroupVerifier:
    """What judges the domain's answers; nothing is started before the first answer. To be closed.

    The domain must have a verifier (`has_verifier`). `purse` is for a judge whose budget is a run's.

    Raises:
        RecipeError: a name is unknown, or a user's code cannot be loaded or called.
    """
    opened = {where: _opened(domain, where, name, purse) for where, name in names_of(domain)}
    if not domain.rewards:
        return next(iter(opened.values()))
    parts = [
        WeightedPart(section.shown_as, section.weight, verifier)
        for section, verifier in zip(domain.rewards, opened.values(), strict=True)
    ]
    return WeightedSum(parts, correct_at=domain.correct_at)


def rules_of(domain: DomainSection) -> str:
    """A digest of how the domain's answers are judged: equal where two recipes, on any machines, judge alike.

    A user's file counts by what it contains, wherever it lies.
    """
    texts = []
    for _, name in names_of(domain):
        file = Path(name.rpartition(":")[0])
        if registry.is_user_code(registry.VERIFIERS, name) and file.suffix == ".py" and file.is_file():
            name = f"{file.name}:{name.rpartition(':')[2]}:{hashlib.sha256(file.read_bytes()).hexdigest()}"
        texts.append(name)
    judging = domain.model_dump(mode="json", include=_JUDGING, exclude={"oubliette": _PLACES}) | {
        "rewards": [[part.name, part.weight] for part in domain.rewards], "code": texts
    }  # fmt: skip
    return hashlib.sha256(json.dumps(judging, sort_keys=True).encode()).hexdigest()[:32]


def served_domain(domain: DomainSection, *, purse: JudgeBudget | None) -> ServedDomain:
    """The domain as a verifier service judges it; raises as `open_verifier`."""
    names = {name for _, name in names_of(domain)}
    return ServedDomain(
        verifier=open_verifier(domain, purse=purse),
        rules=rules_of(domain),
        kept=names <= _DETERMINISTIC,
        tier=_sandbox_of(domain) if "oubliette" in names else "",
    )


def _sandbox_of(domain: DomainSection) -> str:
    """How strong the sandbox is at least, and whether another machine has it."""
    return f"remote {domain.oubliette.tier}" if domain.oubliette.url else domain.oubliette.tier.value


def open_filter(config: RunConfig) -> GroupFilter | None:
    """What says of the recipe's finished groups whether they train; nothing is started. To be closed.

    Raises:
        RecipeError: it cannot be loaded or called.
    """
    section = config.curation
    if section.filter is None:
        return None
    if not is_reference(section.filter):
        raise RecipeError(
            f"curation.filter must be path.py:function or package.module:function, got {section.filter!r}"
        )
    return GroupFilter(section.filter, deadline_s=section.filter_timeout_s)


def names_of(domain: DomainSection) -> Iterator[tuple[str, str]]:
    """(key, name) of each part that judges."""
    if not domain.has_verifier:
        return
    if not domain.rewards:
        yield f"domains.{domain.name}.verifier", domain.verifier or DEFAULT_VERIFIER
    for number, part in enumerate(domain.rewards):
        yield f"domains.{domain.name}.rewards.{number}.function", part.function


def user_code(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(key, reference) of each part of the recipe that is a user's code."""
    for where, entries, name in (
        ("engine.type", registry.ENGINES, config.engine.type),
        ("trainer.type", registry.TRAINERS, config.trainer.type),
        *(("elastic.types", registry.ENGINES, type) for type in config.elastic.types if type != config.engine.type),
    ):
        if registry.is_user_code(entries, name):
            yield where, name
    if config.curation.filter is not None:
        yield "curation.filter", config.curation.filter
    for domain in config.domains:
        if domain.environment is not None:
            yield f"domains.{domain.name}.environment", domain.environment
        if domain.source.partition(":")[0] not in registry.SOURCES:
            yield f"domains.{domain.name}.source", domain.source
        for where, name in names_of(domain):
            if registry.is_user_code(registry.VERIFIERS, name):
                yield where, name


def _opened(domain: DomainSection, where: str, name: str, purse: JudgeBudget | None) -> GroupVerifier:
    thing = registry.load(where, registry.VERIFIERS, name)
    deadline_s, workers = domain.verifier_timeout_s, domain.verifier_workers
    if name == "instruction_following":
        section = domain.instructions
        return PerAnswerVerifier(
            thing(score=section.score, matching=section.matching, deadline_s=deadline_s, workers=workers)
        )
    if name == "judge":
        return open_judge(domain, purse=purse)
    if name == "oubliette":
        return PerAnswerVerifier(thing(domain.oubliette.rules, deadline_s=deadline_s, workers=workers))
    if name in _POOLED:
        return PerAnswerVerifier(thing(deadline_s=deadline_s, workers=workers))
    if not registry.is_user_code(registry.VERIFIERS, name):
        return PerAnswerVerifier(thing(), deadline_s=deadline_s)
    if hasattr(thing, "verify"):
        return PerAnswerVerifier(Shielded(_made(where, thing)), deadline_s=deadline_s)
    try:
        reward = RewardFunction.of_callable(thing)
    except RecipeError as error:
        raise RecipeError(f"{where}: {name}: {error}") from None
    if reward.is_async:
        return AsyncReward(reward, correct_at=domain.correct_at, deadline_s=deadline_s)
    return PooledReward(name, reward, correct_at=domain.correct_at, deadline_s=deadline_s, workers=workers)


def _made(where: str, thing: Any) -> Any:
    """A user's verifier: an object, or a class that needs no arguments."""
    if not inspect.isclass(thing):
        return thing
    try:
        return thing()
    except Exception as error:  # whatever the user's code raises
        raise RecipeError(f"{where}: {thing.__name__}() failed: {type(error).__name__}: {error}") from None
