"""The trainer's side of its exchange with the controller.

The trainer reports and the controller directs. A question is a report that has an answer. It is sent again until the
answer arrives, since the server may have lost either. A directive counts if it is the awaited answer, or no answer at
all. A directive of a later epoch ends this trainer; one of an earlier epoch is ignored.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final, final

from pipelinerl.errors import DeadlineError, FencedError
from pipelinerl.messages import (
    EPOCHS,
    REPORTS,
    ControlMessage,
    Directive,
    Question,
    encode,
)
from pipelinerl.streams.stream import Stream, parse_id
from pipelinerl.training.rollouts.rollout_reader import Arrivals, RolloutReader

#: Interval after which an unanswered report is sent again.
RESEND_S: Final = 5.0
#: The longest that one read waits for its first entry.
_BLOCK_S: Final = 1.0


@final
class ControllerLink:
    """Sender of one trainer's reports and receiver of the directives that return.

    Rollouts arrive with them, since one read waits for both: the first arrival of either wakes the trainer.
    """

    def __init__(self, stream: Stream, reader: RolloutReader, *, deadline_s: float) -> None:
        """Create a link; `deadline_s` bounds the wait for an answer."""
        self._stream = stream
        self._reader = reader
        self._deadline_s = deadline_s
        self._directive: Directive | None = None
        self._awaited = ""

    @property
    def current(self) -> Directive:
        """The last directive that counted."""
        assert self._directive is not None, "the trainer waits for the answer to TrainerReady before anything else"
        return self._directive

    async def report(self, message: ControlMessage) -> None:
        """Send a report that has no answer."""
        await self._stream.append(REPORTS, [encode(message)])

    async def wait_for_answer(self, question: Question) -> AsyncIterator[Arrivals]:
        """Send a question, again every `RESEND_S`, and yield what is read until the answer is part of it.

        Raises:
            DeadlineError: the controller does not answer.
            FencedError: another trainer has taken over.
        """
        deadline = time.monotonic() + self._deadline_s
        asked_at = float("-inf")
        self._awaited = question.report_id
        while (now := time.monotonic()) < deadline:
            if now - asked_at >= RESEND_S:
                await self.report(question)
                asked_at = now
            yield await self.read()
            if not self._awaited:
                return
        raise DeadlineError(
            f"the trainer waited {self._deadline_s:.0f} s for the controller to answer {question.report_id}; "
            "is the controller running, with an engine that has joined?"
        )

    async def read(self) -> Arrivals:
        """Return new rollouts and the directives that count, in order, waiting up to a second for the first.

        Before the first directive no rollouts are read, since it says which weights may have sampled them.

        Raises:
            FencedError: a directive is meant for a later trainer.
        """
        if self._directive is None:
            arrivals = Arrivals([], await self._reader.read_directives(block_s=_BLOCK_S))
        else:
            arrivals = await self._reader.read(block_s=_BLOCK_S)
        return replace(arrivals, directives=[directive for directive in arrivals.directives if self._apply(directive)])

    async def raise_if_fenced(self) -> None:
        """Check with the stream server that no later epoch has begun. Called before writes that the server cannot
        refuse.

        Raises:
            FencedError: a later epoch has begun.
        """
        newest, _ = parse_id(await self._stream.last_id(EPOCHS))
        self._check(newest)

    def _apply(self, directive: Directive) -> bool:
        """Make a directive the current one if it counts; return whether it does."""
        self._check(directive.epoch)
        before, is_answer = self._directive, directive.answers == self._awaited
        answers = ("ready-", "leave-", f"e{directive.epoch}-step-", f"e{directive.epoch}-skip-")
        is_unasked = before is not None and not directive.answers.startswith(answers)
        counts = (is_answer or is_unasked) and (before is None or directive.epoch == before.epoch)
        if counts:
            self._directive, self._awaited = directive, "" if is_answer else self._awaited
        return counts

    def _check(self, epoch: int) -> None:
        """Raise FencedError if that epoch is later than this trainer's."""
        if self._directive is not None and epoch > self._directive.epoch:
            raise FencedError(
                f"epoch {epoch} has taken over from epoch {self._directive.epoch}: another trainer is running; this "
                "one stops"
            )
