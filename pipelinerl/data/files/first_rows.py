"""The first rows of data files as problems, for a look before a run, which costs the same whatever a file's size.

Promises that a row in which something is wrong is named as it would be by the run that comes to it, or earlier; which
rows are problems of which split, and which are there twice, is not asked here.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from pipelinerl.data.drafts import Split, digest_of
from pipelinerl.data.files.curriculum import ProblemOrder
from pipelinerl.data.files.rows import FirstRows
from pipelinerl.data.files.source import asked_files, placed, prompts_of_rows, read_rows
from pipelinerl.data.source import SourceRequest
from pipelinerl.types import Problem


def look_at_files(asked: SourceRequest, head: FirstRows, check: Callable[[Problem], None]) -> Problem | None:
    """Make the first problems of each file, and have each checked; returns the first, if there is any.

    Args:
        check: raises `RecipeError` for what nobody could judge.

    Raises:
        RecipeError: naming file, row and what is wrong with it.
    """
    files, field_map, curriculum = asked_files(asked)
    prompts, first = prompts_of_rows(asked), None
    ranked = files[Split.TRAIN] if curriculum.order is not ProblemOrder.SHUFFLED else ()
    for path in dict.fromkeys(chain.from_iterable(files.values())):
        rows = read_rows(path, field_map, head)
        for number in range(len(rows)):
            with placed(rows, number):
                row = rows.row(number)
                problem = prompts.dress(field_map.problem(row, digest_of(field_map.text(row)), domain=asked.domain))
                check(problem)
                if path in ranked:
                    field_map.rate(row)
            first = first or problem
    return first
