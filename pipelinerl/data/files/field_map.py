"""`FieldMap`: maps the fields of a row to a problem's prompt, answer, metadata, tags and id.

Errors name the field; the caller adds the row's location. A digest of the row's question decides its split; the
template's own wording is left out of the digest, so rewording it moves no row to another split. A row's task is its
question, answer and metadata, or the field `id_field`; it gives the problem's id, and rows of one task are duplicates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, Self

from pipelinerl.data.files.rows import Row
from pipelinerl.data.files.values import as_text, plain, valid_text
from pipelinerl.data.prompts import Template, apply_template, has_no_question, question
from pipelinerl.data.source import Draft, digest_of, text_of, to_problem
from pipelinerl.errors import MissingFieldError, RecipeError
from pipelinerl.types import Message, Problem

_PROMPT: Final = "prompt"
_MESSAGES: Final = "messages"
_METADATA: Final = "metadata"
_ROLES: Final = ("system", "user", "assistant", "tool")
_TEXTS: Final = ("prompt_field", "answer_field", "messages_field", "id_field", "rate_field")
_LISTS: Final = ("metadata_fields", "tag_fields")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldMap:
    """Names of a row's fields, by use; `a.b` is the field b of the struct a.

    Attributes:
        prompt_field: the question, a text or a list of messages; by default `prompt`, if the row has no `messages`.
        answer_field: the reference answer; if it names the conversation, this is its last message, the assistant's.
        messages_field: the conversation; `messages` by default.
        metadata_fields: fields passed to the verifier; by default the contents of the object `metadata`.
        tag_fields: fields that each become a tag of the problem, `field=value`.
        tags_field: a list of tags.
        id_field: the problem's name; by default the digest of its question, answer and metadata.
        rate_field: pass rate, the share of a model's answers that solved the row; a curriculum orders rows by it.
        template: template of the last user message, over the row's fields.
    """

    prompt_field: str = ""
    answer_field: str = "answer"
    messages_field: str = ""
    metadata_fields: tuple[str, ...] | None = None
    tag_fields: tuple[str, ...] = ()
    tags_field: str = ""
    id_field: str = ""
    rate_field: str = ""
    template: Template | None = None

    @classmethod
    def taken_from(cls, parameters: dict[str, Any], template: Template | None, *, where: str) -> Self:
        """Build a field map from a recipe's `parameters`, and remove the keys that it uses. Raises `RecipeError`."""
        named: dict[str, Any] = {}
        for key in _TEXTS:
            value = parameters.pop(key, None)
            if value is not None and not (isinstance(value, str) and value):
                raise RecipeError(f"{where}.parameters.{key} must be the name of a field, got {value!r}")
            named |= {key: value} if value is not None else {}
        for key in _LISTS:
            value = parameters.pop(key, None)
            if value is not None and not (isinstance(value, list | tuple) and all(isinstance(i, str) for i in value)):
                raise RecipeError(f"{where}.parameters.{key} must be a list of field names, got {value!r}")
            named |= {key: tuple(value)} if value is not None else {}
        return cls(**named, template=template)

    @property
    def fields(self) -> frozenset[str]:
        """Columns that must be read to build problems."""
        more = {self.rate_field, *(self.metadata_fields or (_METADATA,)), *self.tag_fields}
        return frozenset(name.partition(".")[0] for name in more if name) | self.fields_of_text

    @property
    def fields_of_text(self) -> frozenset[str]:
        """Columns that must be read to call `text` and `check`."""
        names = {self.prompt_field or _PROMPT, self.messages_field or _MESSAGES, self.answer_field, self.id_field}
        return frozenset(name.partition(".")[0] for name in names if name) | self._of_template

    @property
    def _of_template(self) -> frozenset[str]:
        return frozenset() if self.template is None else self.template.fields

    @property
    def plain_prompt(self) -> str:
        """Name of the prompt field if `text` and `check` read only this field and the answer; otherwise ""."""
        more = self.messages_field or self.id_field or self._of_template - {_PROMPT, self.prompt_field}
        return "" if more or self.prompt_field == self.answer_field else self.prompt_field

    def check(self, row: Row) -> None:
        for field in filter(None, (self.answer_field, self.id_field)):
            if value_of(row, field) is None:
                raise _missing(field, row)

    def text(self, row: Row) -> str:
        """Return the text that identifies the row: its messages, and other fields that the template shows."""
        messages = self._messages(row)
        more = sorted(self._of_template - {_PROMPT, self.prompt_field})
        if not more:
            return text_of(messages)
        return "\x1e".join([text_of(messages), *(f"{name}\x1f{as_text(row.get(name), name)}" for name in more)])

    def task(self, row: Row) -> bytes:
        """Return the digest, eight bytes, of what tells the row's task from others; it needs the whole row."""
        if self.id_field:
            return digest_of(self._name(row))
        return self._task(row, self.answer(row), self.metadata(row))

    def _task(self, row: Row, answer: str, metadata: Mapping[str, Any]) -> bytes:
        return digest_of(f"{with_answer(self.text(row), answer)}\x1d{json.dumps(metadata, sort_keys=True)}")

    def answer(self, row: Row) -> str:
        value, field = value_of(row, self.answer_field), self.answer_field
        if field in (self.prompt_field or _PROMPT, self.messages_field or _MESSAGES) and isinstance(value, list):
            return _conversation(value, field)[-1].content
        return as_text(value, field)

    def _name(self, row: Row) -> str:
        return as_text(value_of(row, self.id_field), self.id_field)

    def rate(self, row: Row) -> float:
        value = value_of(row, self.rate_field)
        value = float(value) if isinstance(value, Decimal) else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise RecipeError(
                f"field {self.rate_field!r} must be a pass rate from 0 to 1, for parameters.order, got "
                f"{value!r:.80}; pipelinerl prefilter writes it"
            )
        return float(value)

    def draft(self, row: Row) -> Draft:
        """Convert the row to a `Draft`, a problem without name and domain; a template renders its last user message."""
        self.check(row)
        messages = self._messages(row)
        if self.template is not None:
            shown = {name: plain(row[name], name) for name in self._of_template if name in row}
            messages = apply_template(messages, self.template, {_PROMPT: question(messages), **row, **shown})
            if has_no_question(messages):
                raise RecipeError(
                    f"prompt_template gives an empty prompt from the fields {', '.join(sorted(self._of_template))}"
                )
        values = [(field, value_of(row, field)) for field in self.tag_fields]
        own = row.get(self.tags_field) or ()
        if not (isinstance(own, list | tuple) and all(isinstance(tag, str) for tag in own)):
            raise RecipeError(f"field {self.tags_field!r} must be a list of texts, got {own!r:.80}")
        named = (f"{field}={as_text(value, field)}" for field, value in values if value is not None)
        return Draft(
            messages=messages,
            ground_truth=self.answer(row),
            metadata=self.metadata(row),
            tags=(*(valid_text(tag, self.tags_field) for tag in own), *named),
        )

    def problem(self, row: Row, *, domain: str) -> Problem:
        draft = self.draft(row)
        if self.id_field:
            return to_problem(draft, domain, name=self._name(row))
        return to_problem(draft, domain, name=self._task(row, draft.ground_truth, draft.metadata).hex())

    def _messages(self, row: Row) -> tuple[Message, ...]:
        """Return the conversation; it may be empty only if there is a template."""
        named = [field for field in (self.messages_field, self.prompt_field) if field]
        for field in named or (_MESSAGES, _PROMPT):
            value = value_of(row, field)
            if value is not None:
                messages = _conversation(value, field)
                answered = messages[-1].role == "assistant"
                if field == self.answer_field:
                    if not answered or len(messages) == 1:
                        raise RecipeError(f"field {field!r} must end with the answer, a message of the assistant")
                    messages = messages[:-1]
                elif answered:
                    raise RecipeError(
                        f"field {field!r} ends with the assistant's message; if this is the reference answer, set "
                        f"answer_field={field}, else end with what the model shall answer"
                    )
                if self.template is None and has_no_question(messages):
                    raise RecipeError(f'field "{field}" is empty: it, or its last message, has only white space')
                return messages
        if self.template is not None and not named:
            return ()
        raise _missing(named[0] if named else _PROMPT, row)

    def metadata(self, row: Row) -> Mapping[str, Any]:
        """Return the fields for the verifier. Raises `RecipeError` if a value has no exact form."""
        if self.metadata_fields is not None:
            values = {field: value_of(row, field) for field in self.metadata_fields}
            return {field: plain(value, field) for field, value in values.items() if value is not None}
        own = row.get(_METADATA)
        if own is None:
            return {}
        if not isinstance(own, dict):
            raise RecipeError(f"field {_METADATA!r} must be an object, got {own!r:.80}; name metadata_fields")
        return dict(plain(own, _METADATA))


def value_of(row: Row, field: str) -> Any:
    """Return the value of a row's field; None if it is missing."""
    if field in row or "." not in field:
        return row.get(field)
    value: Any = row
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _conversation(value: Any, field: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        return (Message("user", valid_text(value, field)),)
    turns = value if isinstance(value, list) else []
    messages = tuple(
        Message(turn["role"], valid_text(turn["content"], field))
        for turn in turns
        if (isinstance(turn, dict) and turn.get("role") in _ROLES and isinstance(turn.get("content"), str))
    )
    if not messages or len(messages) < len(turns):
        raise RecipeError(
            f"field {field!r} must be a text, or messages with role ({', '.join(_ROLES)}) and content, got "
            f"{value!r:.120}"
        )
    return messages


def with_answer(text: str, answer: str) -> str:
    """Join the text that identifies a row's question and its answer."""
    return f"{text}\x1d{answer}"


def _missing(field: str, row: Row) -> MissingFieldError:
    return MissingFieldError(field, (name for name, value in row.items() if value is not None))
