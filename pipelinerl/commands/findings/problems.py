"""Checks that problems can be built, judged and rendered, and that prompts fit.

`pipelinerl run` checks a few problems, `pipelinerl check` many. If many prompts leave no room for an answer, the recipe
is refused. If only a few do, as in most large data sets, their share is reported. The engine rejects a prompt that
fills the context, and truncates an answer at the end of the context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

from pipelinerl.component import imported
from pipelinerl.config.domains import DomainSection
from pipelinerl.config.recipe import RunConfig
from pipelinerl.data.files.rows import FirstRows
from pipelinerl.data.mixture import Mixture
from pipelinerl.data.problems import Split, look_at, open_source
from pipelinerl.data.source import SourceRequest
from pipelinerl.errors import ModelError, RecipeError
from pipelinerl.models.chat_template import refuse_unrenderable
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.types import Problem

#: Number of training problems to check. Evaluation sets are checked in full, and by verifiers finite sources, too.
LOOKED_AT: Final = 256
#: The recipe is refused if a larger share of its prompts leaves no room for an answer.
MOST_WITHOUT_ROOM: Final = 0.1


def prompt_findings(
    config: RunConfig, tokenizer: ChatTokenizer, *, training: Mixture, held_out: Mapping[str, Mixture]
) -> Iterator[tuple[str, str]]:
    """Yield findings: a rendered prompt per domain; prompt lengths and rows in training and in each evaluation set.

    Raises:
        RecipeError: a problem cannot be made, an evaluation set has too few problems, or too many prompts leave no room
            for an answer.
    """
    domains, firsts = {domain.name: domain for domain in config.domains}, dict[str, list[int]]()
    parts: list[tuple[str, Mixture, int, Callable[[DomainSection], int]]] = [
        ("training", training, LOOKED_AT, config.max_tokens_of)
    ]
    for evaluation in config.evaluation_sets:
        name = "held out" if len(held_out) == 1 else f"held out, {evaluation.name}"
        most = partial(config.evaluation_max_tokens_of, asked=evaluation)
        parts.append((name, held_out[evaluation.name], evaluation.problems, most))
    for name, mixture, count, most_tokens in parts:
        problems = [mixture.problem(index) for index in range(count)]
        if not problems:
            yield name, "no problems"
            continue
        lengths: dict[str, list[int]] = {}
        for problem in problems:
            try:
                ids = tokenizer.encode_chat(problem.messages, domains[problem.domain].chat_template_kwargs)
            except ModelError as error:
                raise RecipeError(f"domains.{problem.domain}: {problem.problem_id}: {error}") from None
            lengths.setdefault(problem.domain, []).append(len(ids))
            firsts.setdefault(problem.domain, ids)
        if name == "training":
            for domain, ids in firsts.items():
                yield "prompt", f"of domain {domain}, {len(ids)} tokens:\n{tokenizer.decode(ids)}"
        longest = max(map(max, lengths.values()))
        first = problems[0]
        yield name, f"{first.messages[-1].content!r} → {first.ground_truth!r}; prompts of up to {longest} tokens"
        yield from (("rows", f"{name}, {sentence}") for sentence in mixture.row_counts())
        for domain, each in lengths.items():
            if sentence := _without_room(domain, each, config.engine.context_length - most_tokens(domains[domain])):
                yield "warning", f"{name}: {sentence}"


def _without_room(domain: str, lengths: list[int], room: int) -> str:
    """Return a warning if some prompts are longer than `room`; raise `RecipeError` if too many are."""
    share, longest = sum(length > room for length in lengths) / len(lengths), max(lengths)
    if share > MOST_WITHOUT_ROOM:
        raise RecipeError(
            f"engine.context_length leaves {room} tokens for a prompt next to max_tokens for its answer, and a prompt "
            f"of {longest} tokens was found: {share:.0%} of {len(lengths)} prompts of domain {domain} do not fit; "
            "raise it, or lower max_tokens"
        )
    if not share:
        return ""
    return (
        f"{share:.1%} of {len(lengths)} prompts of domain {domain} do not fit, the longest with {longest} tokens where "
        f"engine.context_length and max_tokens leave {room}: their answers are cut short, or their orders fail; raise "
        "engine.context_length, or leave such problems out"
    )


def verifier_findings(config: RunConfig, domain: DomainSection) -> Iterator[tuple[str, str]]:
    """Yield findings of the domain's verifiers on its problems; raise `RecipeError` if one cannot be judged."""

    def problems() -> Iterator[Problem]:  # of training, the first ones if there is no end of them, and held-out ones
        evaluated = [Split(config.evaluation.split)] if config.evaluation.problems else []
        for split in (Split.TRAIN, *evaluated):
            source = open_source(
                domain.source,
                domain=domain.name,
                split=split,
                seed=config.run.seed,
                parameters=domain.parameters,
                prompts=domain.prompts,
            )
            length = getattr(source, "__len__", None)
            count = length() if length else LOOKED_AT if split is Split.TRAIN else config.evaluation.problems
            yield from (source.problem(index) for index in range(count))

    for name, component, options in domain.registered_verifiers:
        if component.check:
            try:
                for finding in imported(component.check)(options, problems()):
                    yield component.key or name, f"domains.{domain.name}: {finding}"
            except RecipeError as error:
                raise RecipeError(f"domains.{domain.name}: {error}") from None


#: The first rows of each data file, which `pipelinerl run` checks in about a tenth of a second.
FIRST: Final = FirstRows(rows=2048, bytes=16 * 2**20)
#: The first rows of each data file, which `pipelinerl check` checks in one to two seconds.
MOST: Final = FirstRows(rows=50_000, bytes=2**30)


def refuse_problems(config: RunConfig, head: FirstRows) -> None:
    """Build problems from the first rows (`head`) of each domain's files, and render each domain's first problem.

    Raises:
        RecipeError: a row is invalid (the message names it), or the chat template rejects the messages of a domain.
        ModelError: the model's tokenizer cannot be read.
    """
    for domain in config.domains:
        evaluated = (Split(each.split) for each in config.evaluation_sets if domain.name in each.domains)
        request = SourceRequest(
            domain=domain.name,
            split=Split.TRAIN if domain.weight else next(evaluated, Split.TRAIN),
            seed=config.run.seed,
            parameters=domain.parameters,
            prompts=domain.prompts,
        )
        checks = {component.check_problem for _, component, _ in domain.registered_verifiers} - {""}

        def readable(problem: Problem, checks: set[str] = checks) -> None:
            for check in sorted(checks):
                imported(check)(problem)

        first = look_at(domain.source, request, head, readable)
        if first is None:
            continue
        try:
            refuse_unrenderable(config.model.resolved, first.messages, domain.chat_template_kwargs)
        except ModelError as error:
            roles = ", ".join(message.role for message in first.messages)
            raise RecipeError(
                f"domains.{domain.name}: messages of {roles}: {error} (the template of {config.model.resolved})"
            ) from None
