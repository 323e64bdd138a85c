"""`Conversation`: the trainer's side of its talk with the controller: what it reports, asks, hears and obeys.

The trainer reports and the controller directs. A question is a report that has an answer: it is put again until the
answer has come, since the server may have lost either. A directive counts when it is the answer that is awaited, or
answers nobody; one of a later epoch ends this trainer, one of an earlier epoch is not heard.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Final, final

from pipelinerl.errors import DeadlineError, FencedError
from pipelinerl.messages import EPOCHS, REPORTS, ControlMessage, Directive, StepDone, StepSkipped, TrainerReady, encode
from pipelinerl.streams.stream import Stream, parse_id

#: What is silent for longer is asked, or told, again.
PATIENCE_S: Final = 5.0


@final
class Conversation:
    """One trainer's, from its first question to its last report."""

    def __init__(self, stream: Stream, *, deadline_s: float, obey: Callable[[Directive], Awaitable[None]]) -> None:
        """`obey` does what a directive says; `current` is that directive already."""
        self._stream = stream
        self._deadline_s = deadline_s
        self._obey = obey
        self._directive: Directive | None = None

    @property
    def current(self) -> Directive:
        """The last directive that counted."""
        assert self._directive is not None, "the loop obeys a directive before anything else"
        return self._directive

    async def report(self, message: ControlMessage) -> None:
        """Tell the controller."""
        await self._stream.append(REPORTS, [encode(message)])

    async def ask(
        self, question: TrainerReady | StepDone | StepSkipped, read: Callable[..., Awaitable[list[Directive]]]
    ) -> None:
        """Report, and again every few seconds (the server may have lost it, or its answer), until it is answered.

        The answer is obeyed, and so is what was said unasked, in its order.

        Raises:
            DeadlineError: nobody answers.
            FencedError: another trainer has taken over.
        """
        deadline = time.monotonic() + self._deadline_s
        asked_at = float("-inf")
        while (now := time.monotonic()) < deadline:
            if now - asked_at >= PATIENCE_S:
                await self.report(question)
                asked_at = now
            awaited = question.report_id
            for directive in await read(block_s=1.0):
                if await self.hear(directive, awaited):
                    awaited = ""
            if not awaited:
                return
        raise DeadlineError(
            f"the trainer waited {self._deadline_s:.0f} s for the controller to answer {question.report_id}; "
            "is the controller running, with an engine that has joined?"
        )

    async def raise_if_fenced(self) -> None:
        """Asked of the stream server before each write that it cannot refuse by itself.

        Raises:
            FencedError: a later epoch has begun.
        """
        newest, _ = parse_id(await self._stream.last_id(EPOCHS))
        self._check(newest)

    async def hear(self, directive: Directive, awaited: str = "") -> bool:
        """Obey a directive that answers `awaited`, or that answers nobody; True when it was the answer.

        Raises:
            FencedError: it is meant for a trainer that came after this one.
        """
        before = self._directive
        self._check(directive.epoch)
        questions = ("ready-", f"e{directive.epoch}-step-", f"e{directive.epoch}-skip-")
        unasked = before is not None and not directive.answers.startswith(questions)
        is_answer = directive.answers == awaited
        if (is_answer or unasked) and (before is None or directive.epoch == before.epoch):
            self._directive = directive
            await self._obey(directive)
        return is_answer

    def _check(self, epoch: int) -> None:
        """Raise FencedError when that epoch is later than this trainer's."""
        if self._directive is not None and epoch > self._directive.epoch:
            raise FencedError(
                f"epoch {epoch} has taken over from epoch {self._directive.epoch}: another trainer is running; this "
                "one stops"
            )
