"""`Prompts`: how a domain dresses its problems: a system prompt, few-shot messages, a template.

    [system prompt] [few-shot messages …] [the problem's messages, the last user message through the template]

Promises that a problem keeps its id and split whatever it is dressed in, that one which asks nothing is refused, and
that all of it is text: no message of a user or of data becomes a control token (`models/control_tokens.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pipelinerl.data.templates import Template
from pipelinerl.errors import RecipeError
from pipelinerl.types import Message, Problem

_SYSTEM: Final = "system"
_USER: Final = "user"
_TOOL: Final = "tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The parts of a prompt that a domain adds.

    Attributes:
        system: stands first, in place of a system message of the problem's own.
        few_shot: stand before the problem's messages.
        template: of the last user message; over the fields of the problem's row, or over `prompt`, what that message
            would have been, and the metadata's fields.
    """

    system: str = ""
    few_shot: tuple[Message, ...] = ()
    template: Template | None = None

    def around(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """These messages, with the system prompt and the few-shot messages before them."""
        if not (self.system or self.few_shot):
            return tuple(messages)
        own = [message for message in messages[:1] if message.role == _SYSTEM]
        first = [Message(_SYSTEM, self.system)] if self.system else own
        return (*first, *self.few_shot, *messages[len(own) :])

    def dress(self, problem: Problem) -> Problem:
        """The problem as this domain asks it.

        Raises:
            RecipeError: the template needs a field that the problem does not have, or nothing is asked.
        """
        messages = problem.messages
        if self.template is not None:
            fields = {"prompt": question(messages), **problem.metadata}
            try:
                messages = asked_by(messages, self.template, fields)
            except RecipeError as error:
                raise RecipeError(f"{problem.problem_id}: {error}") from None
        if asks_nothing(messages):
            raise RecipeError(f"{problem.problem_id} asks nothing: it has no message, or the last one is empty")
        return problem if self == NO_PROMPTS else replace(problem, messages=self.around(messages))


NO_PROMPTS: Final = Prompts()


def question(messages: Sequence[Message]) -> str | None:
    """The last user message's text."""
    return next((message.content for message in reversed(messages) if message.role == _USER), None)


def asks_nothing(messages: Sequence[Message]) -> bool:
    """Is there no message, or nothing but white space in the last one, which is for the model to answer?

    A tool may well have found nothing.
    """
    return not messages or (messages[-1].role != _TOOL and not messages[-1].content.strip())


def asked_by(messages: Sequence[Message], template: Template, fields: Mapping[str, Any]) -> tuple[Message, ...]:
    """The messages with the last user message as the template writes it; with none, that one is added."""
    asked = Message(_USER, template.render(fields))
    last = max((place for place, message in enumerate(messages) if message.role == _USER), default=len(messages))
    return (*messages[:last], asked, *messages[last + 1 :])
