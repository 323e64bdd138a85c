"""`Prompts`: what a domain adds to the prompts of its problems: a system prompt, few-shot messages and a template.

    [system prompt] [few-shot messages …] [the problem's messages, the last user message through the template]

A problem keeps its id and split under any prompts, and an empty question is rejected. All parts are text: no message of
a user or of data becomes a control token (`models/control_tokens.py`).
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
        system: system prompt, which comes first and replaces the problem's own system message.
        few_shot: messages that come before the problem's messages.
        template: rewrites the last user message. Its fields are those of the problem's row, or `prompt` (the original
            message) and the fields of the metadata.
    """

    system: str = ""
    few_shot: tuple[Message, ...] = ()
    template: Template | None = None

    def around(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return these messages, preceded by the system prompt and the few-shot messages."""
        if not (self.system or self.few_shot):
            return tuple(messages)
        own = [message for message in messages[:1] if message.role == _SYSTEM]
        first = [Message(_SYSTEM, self.system)] if self.system else own
        return (*first, *self.few_shot, *messages[len(own) :])

    def dress(self, problem: Problem) -> Problem:
        """Return the problem with this domain's prompts.

        Raises:
            RecipeError: the template needs a field that the problem does not have, or the question is empty.
        """
        messages = problem.messages
        if self.template is not None:
            fields = {"prompt": question(messages), **problem.metadata}
            try:
                messages = apply_template(messages, self.template, fields)
            except RecipeError as error:
                raise RecipeError(f"{problem.problem_id}: {error}") from None
        if has_no_question(messages):
            raise RecipeError(f"{problem.problem_id} has no question: it has no message, or the last one is empty")
        return problem if self == NO_PROMPTS else replace(problem, messages=self.around(messages))


NO_PROMPTS: Final = Prompts()


def question(messages: Sequence[Message]) -> str | None:
    """Return the last user message's text."""
    return next((message.content for message in reversed(messages) if message.role == _USER), None)


def has_no_question(messages: Sequence[Message]) -> bool:
    """Return whether there is no message to answer, or the last message holds only white space.

    A tool's message may be empty: the tool may have found nothing.
    """
    return not messages or (messages[-1].role != _TOOL and not messages[-1].content.strip())


def apply_template(messages: Sequence[Message], template: Template, fields: Mapping[str, Any]) -> tuple[Message, ...]:
    """Replace the last user message by the rendered template, or append it if there is none."""
    rendered = Message(_USER, template.render(fields))
    last = max((place for place, message in enumerate(messages) if message.role == _USER), default=len(messages))
    return (*messages[:last], rendered, *messages[last + 1 :])
