"""What `pipelinerl check` says of instructions: those that problems name are known, and have the parameters they need.

Promises that an unknown instruction or a wrong parameter is told before a run, with the problem that names it: each row
of data is looked at, and so many of the problems of a generator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from pipelinerl.config.domains import DomainSection
from pipelinerl.config.recipe import RunConfig
from pipelinerl.data.problems import Split, open_source
from pipelinerl.errors import RecipeError
from pipelinerl.roles.verification import names_of
from pipelinerl.verifiers.instruction_following import instructions_of_problem

#: Problems of a source without end.
_LOOKED_AT: Final = 256
_VERIFIER: Final = "instruction_following"


def instruction_findings(config: RunConfig, domain: DomainSection) -> Iterator[tuple[str, str]]:
    """(part, finding): which instructions the domain's problems give, where they are judged by them.

    Raises:
        RecipeError: a problem names no instruction, an unknown one, or a wrong parameter.
    """
    if _VERIFIER not in {name for _, name in names_of(domain)}:
        return
    counts: Counter[str] = Counter()
    looked_at = 0
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
        count = length() if length else _LOOKED_AT if split is Split.TRAIN else config.evaluation.problems
        for index in range(count):
            problem = source.problem(index)
            try:
                asked = instructions_of_problem(problem)
            except RecipeError as error:
                raise RecipeError(f"domains.{domain.name}: {problem.problem_id}: {error}") from None
            counts.update({each.id for each in asked})
            looked_at += 1
    most = ", ".join(f"{id} {count / looked_at:.0%}" for id, count in counts.most_common())
    yield "instructions", f"domains.{domain.name}: of {looked_at} problems, {most}"
