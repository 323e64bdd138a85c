"""`Spending`: counts the calls and tokens of judging, and limits them for a whole run.

The number of calls never exceeds the budget, even with concurrent calls. Each call is counted, and the count saved,
before the call is made, so a killed and restarted process continues from it. Tokens are known only after a call, so
calls in flight may exceed the limit on tokens.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import final

from pipelinerl.errors import RecipeError

log = logging.getLogger("pipelinerl")


class Spent(Exception):
    """The budget is exhausted, or its count cannot be saved; the message gives a remedy."""


@final
class Spending:
    """Counts of one process and one domain.

    Args:
        where: the domain's path in the recipe, for messages.
        most_calls, most_tokens: the limits; None for no limit.
        file: file that keeps the counts when the process ends; without a file they begin at 0.
    """

    def __init__(
        self, *, where: str, most_calls: int | None, most_tokens: int | None, file: Path | None = None
    ) -> None:
        self._where = where
        self._most_calls = most_calls
        self._most_tokens = most_tokens
        self._file = file
        self._logged = False
        self.calls, self.tokens = (0, 0) if file is None else _read(file)

    def begin_call(self) -> None:
        """Count a call that is about to be made.

        Raises:
            Spent: the call would exceed the budget. The first such call is logged.
        """
        for name, spent, most in (("calls", self.calls, self._most_calls), ("tokens", self.tokens, self._most_tokens)):
            if most is not None and spent >= most:
                sentence = (
                    f"{self._where}.judge: this process has spent its share of {most} {name}, so answers are masked; "
                    f"raise judge.most_{name} or lower judge.votes"
                )
                if not self._logged:
                    log.error("%s", sentence)
                    self._logged = True
                raise Spent(sentence)
        self.calls += 1
        self._write()

    def note_tokens(self, tokens: int) -> None:
        """Count the tokens of a call, prompt and reply."""
        self.tokens += tokens
        self._write()

    def _write(self) -> None:
        if self._file is None:
            return
        draft = self._file.with_name(f"{self._file.name}.new")
        try:
            draft.write_text(json.dumps({"calls": self.calls, "tokens": self.tokens}))
            draft.replace(self._file)
        except OSError as error:
            raise Spent(f"{self._where}.judge: {draft} cannot be written, so judging stops: {error.strerror}") from None


def _read(file: Path) -> tuple[int, int]:
    try:
        counts = json.loads(file.read_text())
        return int(counts["calls"]), int(counts["tokens"])
    except FileNotFoundError:
        file.parent.mkdir(parents=True, exist_ok=True)
        return 0, 0
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RecipeError(f"{file} must hold the budget spent so far, and is damaged: {error}") from None
