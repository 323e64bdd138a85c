"""A check of a recipe's problems before a run: that they can be built, judged and rendered by the chat template.

`pipelinerl run` checks a few problems before it starts anything, `pipelinerl check` checks many. Only numpy is
imported, unless a user's code imports more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pipelinerl import registry
from pipelinerl.config.domains import DomainSection
from pipelinerl.config.recipe import RunConfig
from pipelinerl.data.files.rows import FirstRows
from pipelinerl.data.problems import Split, look_at
from pipelinerl.data.source import SourceRequest
from pipelinerl.errors import ModelError, RecipeError
from pipelinerl.models.tokenizer import refuse_unrenderable
from pipelinerl.roles.verification import names_of
from pipelinerl.types import Problem

#: Rows of each data file that `run` checks, in about a tenth of a second.
FIRST: Final = FirstRows(rows=2048, bytes=16 * 2**20)
#: Rows of each data file that `check` checks, in one to two seconds.
MOST: Final = FirstRows(rows=50_000, bytes=2**30)


def refuse_problems(config: RunConfig, head: FirstRows) -> None:
    """Build problems from the first rows of each domain's files, and render the first problem as the engine will.

    `head` limits the rows that are read from each file.

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
        first = look_at(domain.source, request, head, _readable_by(domain))
        if first is None:
            continue
        try:
            refuse_unrenderable(config.model.resolved, first.messages, domain.chat_template_kwargs)
        except ModelError as error:
            roles = ", ".join(message.role for message in first.messages)
            raise RecipeError(
                f"domains.{domain.name}: messages of {roles}: {error} (the template of {config.model.resolved})"
            ) from None


def _readable_by(domain: DomainSection) -> Callable[[Problem], None]:
    """Return a check that raises `RecipeError` for a problem that the domain's verifiers can never judge."""
    names = {name for _, name in names_of(domain)} & registry.PROBLEM_CHECKS.keys()
    checks = [registry.resolve(registry.PROBLEM_CHECKS[name]) for name in sorted(names)]

    def check(problem: Problem) -> None:
        for each in checks:
            each(problem)

    return check
