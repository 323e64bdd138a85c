"""Opens the verifier of a domain's answers: a registered verifier, an LLM judge, a user's code, or a weighted sum."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from pipelinerl import registry
from pipelinerl.component import Component
from pipelinerl.config.domains import DomainSection
from pipelinerl.config.recipe import RunConfig
from pipelinerl.config.sections import shared_values
from pipelinerl.config.verification import DEFAULT_VERIFIER, JudgeSection
from pipelinerl.engines.http.openai_client import OpenAIServer, models_at
from pipelinerl.errors import AddressError, RecipeError
from pipelinerl.plugins.judge.verifier import Judge, JudgeServer, JudgeSettings, ScoreFormat, Spending
from pipelinerl.plugins.verifier_service.wire import ServedDomain
from pipelinerl.system.references import is_reference, users_errors
from pipelinerl.verifiers.group_filter import GroupFilter
from pipelinerl.verifiers.user_code import AsyncReward, PooledReward, RewardFunction, Shielded
from pipelinerl.verifiers.verifier import GroupVerifier, PerAnswerVerifier, WeightedPart, WeightedSum

#: Verifiers that run in worker processes and enforce their own deadlines there.
_POOLED: Final = frozenset({"math_answer", "reasoning_gym"})
#: Verifiers that always give the same verdict on the same answer. User code is not listed, because it may be random.
_DETERMINISTIC: Final = _POOLED | {"instruction_following", "oubliette"}
#: Keys of a domain that, in addition to the verifier's code, determine the verdicts on its answers.
_JUDGING: Final = {"correct_at", "instructions", "judge", "oubliette"}
#: Keys of a domain's `oubliette` section that only say where programs run, and do not change verdicts.
_PLACES: Final = {"url", "key_variable", "repository"}

_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0


class JudgeBudget(NamedTuple):
    """A process's share of the run's budget for LLM judges.

    `folder` is where the process records its spending, and `sharers` the number of processes that divide the budget.
    """

    folder: Path
    sharers: int


def open_verifier(domain: DomainSection, *, budget: JudgeBudget | None = None) -> GroupVerifier:
    """Open the verifier of a domain that has one; the caller closes it.

    The verifier's processes start at `verifier.start` or, without that call, at the first answer. `budget` is for an
    LLM judge: this process's share of the run's budget.

    Raises:
        RecipeError: a name is unknown, or user code cannot be loaded or called.
    """
    opened = {where: _open(domain, where, name, budget) for where, name in names_of(domain)}
    if not domain.rewards:
        return next(iter(opened.values()))
    parts = [
        WeightedPart(section.shown_as, section.weight, verifier)
        for section, verifier in zip(domain.rewards, opened.values(), strict=True)
    ]
    return WeightedSum(parts, correct_at=domain.correct_at)


def rules_of(domain: DomainSection) -> str:
    """Return a digest of the rules that judge the domain's answers; equal rules have equal digests on all machines.

    A user's file is identified by its contents.
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


def served_domain(domain: DomainSection, *, budget: JudgeBudget | None) -> ServedDomain:
    """Return what a verifier service needs to serve a domain: verifier, rules, sandbox; raises like `open_verifier`."""
    names, sandbox = {name for _, name in names_of(domain)}, domain.oubliette
    tier = f"remote {sandbox.tier}" if sandbox.url else sandbox.tier.value
    return ServedDomain(
        verifier=open_verifier(domain, budget=budget),
        rules=rules_of(domain),
        kept=names <= _DETERMINISTIC,
        tier=tier if "oubliette" in names else "",
    )


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


def names_of(domain: DomainSection) -> Iterator[tuple[str, str]]:
    """Yield the recipe's key and the verifier's name for each verifier of the domain."""
    if not domain.has_verifier:
        return
    if not domain.rewards:
        yield f"domains.{domain.name}.verifier", domain.verifier or DEFAULT_VERIFIER
    for number, part in enumerate(domain.rewards):
        yield f"domains.{domain.name}.rewards.{number}.function", part.function


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
        for where, name in names_of(domain):
            if registry.is_user_code(registry.VERIFIERS, name):
                yield where, name


def _open(domain: DomainSection, where: str, name: str, budget: JudgeBudget | None) -> GroupVerifier:
    thing = registry.load(where, registry.VERIFIERS, name)
    deadline_s, workers = domain.verifier_timeout_s, domain.verifier_workers
    if name == "instruction_following":
        section = domain.instructions
        return PerAnswerVerifier(
            thing(score=section.score, matching=section.matching, deadline_s=deadline_s, workers=workers)
        )
    if name == "judge":
        return open_judge(domain, budget=budget)
    if name == "oubliette":
        return PerAnswerVerifier(thing(domain.oubliette.rules, deadline_s=deadline_s, workers=workers))
    if name in _POOLED:
        return PerAnswerVerifier(thing(deadline_s=deadline_s, workers=workers))
    if not registry.is_user_code(registry.VERIFIERS, name):
        return PerAnswerVerifier(thing(), deadline_s=deadline_s)
    if hasattr(thing, "verify"):
        return PerAnswerVerifier(Shielded(_instance_of(where, thing)), deadline_s=deadline_s)
    try:
        reward = RewardFunction.of_callable(thing)
    except RecipeError as error:
        raise RecipeError(f"{where}: {name}: {error}") from None
    if reward.is_async:
        return AsyncReward(reward, correct_at=domain.correct_at, deadline_s=deadline_s)
    return PooledReward(name, reward, correct_at=domain.correct_at, deadline_s=deadline_s, workers=workers)


def _instance_of(where: str, thing: Any) -> Any:
    if not inspect.isclass(thing):
        return thing
    with users_errors(where, thing):
        return thing()


def open_judge(domain: DomainSection, *, budget: JudgeBudget | None) -> Judge:
    """Open the domain's LLM judge. Without `budget`, it may spend the run's whole budget; earlier spending is ignored.

    Raises:
        RecipeError: the domain names no server, or the server's API key is missing.
    """
    where, section = f"domains.{domain.name}", domain.judge
    if section is None:
        raise RecipeError(f'{where}.judge must name a server: judge = {{ url = "http://host:port" }}')
    try:
        key = section.key
    except RecipeError as error:
        raise RecipeError(f"{where}.{error}") from None
    token = None if key is None else key.get_secret_value()
    limits = {name: getattr(section, name) for name in ("most_calls", "most_tokens")}
    if budget is not None:  # divide the run's budget
        limits = {name: most and max(1, most // budget.sharers) for name, most in limits.items()}
    is_limited = any(most is not None for most in limits.values())
    spending = Spending(
        where=where,
        **limits,
        file=budget.folder / f"{quote(domain.name, safe='')}.json" if budget is not None and is_limited else None,
    )
    pattern = None if section.pattern is None else re.compile(section.pattern)
    settings = JudgeSettings(
        **shared_values(section, JudgeSettings) | {"rubric": section.template},
        format=ScoreFormat(low=section.low, high=section.high, pattern=pattern),
        correct_at=domain.correct_at,
    )
    return Judge(
        settings,
        open_server=lambda: _open_server(section, token),
        spending=spending,
    )


async def _open_server(section: JudgeSection, token: str | None) -> JudgeServer:
    # If the recipe names no model, request the model's name from the server, with retries for as long as a vote may
    # take.
    model, deadline, pause_s = section.model, time.monotonic() + section.timeout_s, _FIRST_PAUSE_S
    while model is None:
        try:
            model = (await models_at(section.url, token=token))[0]["id"]
        except AddressError:
            if time.monotonic() + pause_s >= deadline:
                raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    fields = {str(field): name for field, name in section.request_fields.items()}
    return OpenAIServer(section.url, model=model, token=token, deadline_s=section.timeout_s, fields=fields)
