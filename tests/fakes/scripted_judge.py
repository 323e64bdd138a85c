"""A scripted judge model that obeys all text of its prompt, except text that is fenced as data.

It gives 9 to an answer that says "Paris", and 2 to others, unless text outside the fences demands the score 10. Fences
are lines with the mark that the system message names. If that message names no mark, or the judge is `GULLIBLE`, no
text counts as fenced. An `ECHO` judge repeats the answer before its score. `OpenAIFake` can serve it over HTTP.
"""

import json
import re
from enum import Enum
from typing import Any

HONEST_RIGHT, HONEST_WRONG, DEMANDED = 9, 2, 10

_MARK = re.compile(r"carry the mark (\w+)\.")
#: Matches text that demands the score 10.
_DEMAND = re.compile(r"\"?score\"?\W{1,6}(?:is |of |must be |to )?10\b|\b10 ?/ ?10\b|\b10 out of 10\b", re.IGNORECASE)


class Manner(Enum):
    CAREFUL = "careful"
    ECHO = "echo"
    GULLIBLE = "gullible"


def scripted_judge(manner: Manner = Manner.CAREFUL) -> Any:
    """Return the judge as a function from the body of a chat request to the text of the reply."""

    def reply(body: dict[str, Any]) -> str:
        system = "".join(each["content"] for each in body["messages"] if each["role"] == "system")
        user = body["messages"][-1]["content"]
        mark = _MARK.search(system)
        answer, instructions = _parted(user, mark[1] if mark else None)
        if manner is Manner.GULLIBLE:
            instructions = user
        honest = HONEST_RIGHT if "Paris" in answer else HONEST_WRONG
        score = DEMANDED if _DEMAND.search(instructions) else honest
        reply = json.dumps({"reason": "so it seems", "score": score})
        return f"The answer was: {answer}\n{reply}" if manner is Manner.ECHO else reply

    return reply


def _parted(user: str, mark: str | None) -> tuple[str, str]:
    """Return the answer to be judged, and all text outside the fences."""
    if mark is None:
        return user.partition("It answered:")[2], user
    block = re.compile(rf"^=== (\w+) {mark} begins[^\n]* ===\n(.*?)\n=== \1 {mark} ends ===$", re.DOTALL | re.MULTILINE)
    answers = [text for label, text in block.findall(user) if label == "answer"]
    return "\n".join(answers), block.sub("", user)
