"""Code of a user that returns or raises hostile values: a reward function, an async one, a class and an environment.

The number of the case is the answer's text or the problem's id (`hostile_values.case`).
"""

from typing import Any

from hostile_values import happen  # in the same folder, which is on the path while this file is imported

from pipelinerl.types import Outcome, Verdict


def score(completion: str) -> Any:
    return happen(int(completion))


async def score_async(completion: str) -> Any:
    return happen(int(completion))


class Judge:
    async def verify(self, problem: Any, completion_text: str) -> Any:
        value = happen(int(completion_text))
        return value if isinstance(value, Verdict) else Verdict(outcome=Outcome.CORRECT, reward=value)


async def play(task: Any, client: Any) -> Any:
    return happen(int(task.problem_id))
