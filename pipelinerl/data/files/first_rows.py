"""Checks of the first rows of data files before a run, at a cost independent of file size.

An invalid row gives the same error as it would during the run. Splits and duplicates are not checked here.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from pipelinerl.data.drafts import Split, digest_of
from pipelinerl.data.files.curriculum import ProblemOrder
from pipelinerl.data.files.rows import FirstRows
from pipelinerl.data.files.source import parse_files_request, placed, prompts_of_rows, read_rows
from pipelinerl.data.source import SourceRequest
from pipelinerl.types import Problem


def look_at_files(request: SourceRequest, head: FirstRows, check: Callable[[Problem], None]) -> Problem | None:
    """Make and check problems from the first rows of each file; return the first problem, or None if there is none.

    Args:
        check: raises `RecipeError` for a problem that cannot be verified.

    Raises:
        RecipeError: a problem is invalid; the message names file, row and problem.
    """
    files, field_map, curriculum = parse_files_request(request)
    prompts, first = prompts_of_rows(request), None
    ranked = files[Split.TRAIN] if curriculum.order is not ProblemOrder.SHUFFLED else ()
    for path in dict.fromkeys(chain.from_iterable(files.values())):
        rows = read_rows(path, field_map, head)
        for number in range(len(rows)):
            with placed(rows, number):
                row = rows.row(number)
                problem = prompts.dress(field_map.problem(row, digest_of(field_map.text(row)), domain=request.domain))
                check(problem)
                if path in ranked:
                    field_map.rate(row)
            first = first or problem
    return first
