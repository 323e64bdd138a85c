"""`Prompts`: the system prompt, few-shot messages and template that a domain adds to its problems.

    [system prompt] [few-shot messages …] [the problem's messages, the last user message through the template]

Prompts do not change a problem's id and split. All parts are text and never become control tokens
(`models/control_tokens.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from pipelinerl.errors import RecipeError
from pipelinerl.types import Message, Problem

_PLACE: Final = re.compile(r"\{([A-Za-z_]\w*)\}|\{\{\}\}")
#: Syntax of Jinja: `{{ name }}`, `{% if … %}`, `{# … #}`. LaTeX's `\boxed{}` and `\boxed{{}}` do not match.
_JINJA: Final = re.compile(r"\{\{-?\s*[^\s{}-]|\{%|\{#")
#: Errors raised when a template computes with a field of an unexpected type.
_FAILURES: Final = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)


class Template:
    """A prompt with placeholders for a problem's fields: a Jinja template, or a text with `{field}`.

    Field values are never parsed as a template, and a template can access only the fields (Jinja's sandbox). Errors
    begin with `where`, the template's key in the recipe. Templates with equal text are equal. Raises `RecipeError` if
    the text uses Jinja syntax but is not a valid template.
    """

    def __init__(self, text: str, *, where: str = "prompt_template") -> None:
        self.text = text
        self._where = where
        self.is_jinja = _JINJA.search(text) is not None
        if self.is_jinja:
            _ = self._compiled

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Template) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def fields(self) -> frozenset[str]:
        return self._compiled[1] if self.is_jinja else frozenset(filter(None, _PLACE.findall(self.text)))

    def render(self, fields: Mapping[str, Any]) -> str:
        """Fill in the template's fields. Raises `RecipeError` if one is missing or None, or if Jinja fails."""
        present = {name: value for name, value in fields.items() if value is not None}
        if not self.is_jinja:
            self._check_fields(present)
            return _PLACE.sub(lambda place: str(present[place[1]]) if place[1] else "{}", self.text)
        from jinja2 import TemplateError, UndefinedError

        try:
            return str(self._compiled[0].render(present))
        except UndefinedError as error:
            self._check_fields(present)
            raise RecipeError(f"{self._where}: {error.message}") from None
        except (TemplateError, *_FAILURES) as error:
            raise RecipeError(f"{self._where}: {type(error).__name__}: {error}") from None

    def _check_fields(self, present: Mapping[str, Any]) -> None:
        if missing := sorted(self.fields - present.keys()):
            available = ", ".join(sorted(present)) or "no field"
            raise RecipeError(f'{self._where}: field "{missing[0]}" is missing; available: {available}') from None

    @cached_property
    def _compiled(self) -> tuple[Any, frozenset[str]]:
        from jinja2 import StrictUndefined, TemplateSyntaxError, meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        world = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
        try:
            fields = frozenset(meta.find_undeclared_variables(world.parse(self.text)))
            return world.from_string(self.text), fields
        except TemplateSyntaxError as error:
            raise RecipeError(
                f"{self._where} is not a valid Jinja template: line {error.lineno}: {error.message}"
            ) from None


_SYSTEM: Final = "system"
_USER: Final = "user"
_TOOL: Final = "tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The parts of a prompt that a domain adds.

    Attributes:
        system: system prompt, which replaces the problem's system message.
        few_shot: messages between the system prompt and the problem's messages.
        template: rewrites the last user message. Its fields are `prompt` (the original message), and the columns of
            the row from which the problem was read, or the problem's metadata if it was not read from rows.
    """

    system: str = ""
    few_shot: tuple[Message, ...] = ()
    template: Template | None = None

    def around(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return the messages with the system prompt and the few-shot messages before them."""
        if not (self.system or self.few_shot):
            return tuple(messages)
        own = [message for message in messages[:1] if message.role == _SYSTEM]
        first = [Message(_SYSTEM, self.system)] if self.system else own
        return (*first, *self.few_shot, *messages[len(own) :])

    def dress(self, problem: Problem) -> Problem:
        """Add the prompts to a problem. Raises `RecipeError` if the template lacks a field or the question is empty."""
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
    """Return the text of the last user message; None if there is none."""
    return next((message.content for message in reversed(messages) if message.role == _USER), None)


def has_no_question(messages: Sequence[Message]) -> bool:
    """Return True if there is no message or the last one is blank; a blank result of a tool counts as a question."""
    return not messages or (messages[-1].role != _TOOL and not messages[-1].content.strip())


def apply_template(messages: Sequence[Message], template: Template, fields: Mapping[str, Any]) -> tuple[Message, ...]:
    """Replace the last user message by the rendered template, or append it if there is none."""
    rendered = Message(_USER, template.render(fields))
    last = max((place for place, message in enumerate(messages) if message.role == _USER), default=len(messages))
    return (*messages[:last], rendered, *messages[last + 1 :])
