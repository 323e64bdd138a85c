"""A scripted judge that obeys any text of its prompt that is not quoted data.

Behind `OpenAIFake` it judges over real HTTP. It gives 9 to an answer that says "Paris", else 2; but it obeys a demand
for a score outside the fences that carry the mark named by its system message. If that message names no mark, or the
judge is `GULLIBLE`, no text counts as fenced. `ECHO` repeats the answer before its score.
"""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Any

HONEST_RIGHT, HONEST_WRONG, DEMANDED = 9, 2, 10

_MARK = re.compile(r"carry the mark (\w+)\.")
#: Texts that count as a demand for the score 10.
_DEMAND = re.compile(r"\"?score\"?\W{1,6}(?:is |of |must be |to )?10\b|\b10 ?/ ?10\b|\b10 out of 10\b", re.IGNORECASE)


class Manner(Enum):
    CAREFUL = "careful"
    ECHO = "echo"
    GULLIBLE = "gullible"


def scripted_judge(manner: Manner = Manner.CAREFUL) -> Any:
    """Return a function from the body of a chat request to the reply's text."""

    def reply(body: dict[str, Any]) -> str:
        system = "".join(each["content"] for each in body["messages"] if each["role"] == "system")
        user = body["messages"][-1]["content"]
        mark = _MARK.search(system)
        answer, instructions = _parted(user, mark[1] if mark else None)
        if manner is Manner.GULLIBLE:
            instructions = user
        honest = HONEST_RIGHT if "Paris" in answer else HONEST_WRONG
        score = DEMANDED if _DEMAND.search(instructions) else honest
        said = json.dumps({"reason": "so it seems", "score": score})
        return f"The answer was: {answer}\n{said}" if manner is Manner.ECHO else said

    return reply


def _parted(user: str, mark: str | None) -> tuple[str, str]:
    """Return the answer to be judged, and all text outside the fences."""
    if mark is None:
        return user.partition("It answered:")[2], user
    block = re.compile(rf"^=== (\w+) {mark} begins[^\n]* ===\n(.*?)\n=== \1 {mark} ends ===$", re.DOTALL | re.MULTILINE)
    answers = [text for label, text in block.findall(user) if label == "answer"]
    return "\n".join(answers), block.sub("", user)
