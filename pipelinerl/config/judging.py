"""Sections of a domain that say how a registered verifier judges, where it can be told: docs/verification.md."""

from __future__ import annotations

import os
import re
from typing import Annotated, Final, Self

from pydantic import Field, SecretStr, StringConstraints, field_validator, model_validator

from pipelinerl.config.sections import Section
from pipelinerl.data.templates import Template
from pipelinerl.enums import HOTTEST
from pipelinerl.errors import RecipeError
from pipelinerl.instructions.scoring import Matching, Score

#: Rubrics by name.
RUBRICS: Final = {
    "quality": (
        "A model was asked this:\n\n{{ question }}\n\nIt answered:\n\n{{ answer }}\n\n"
        "How well does the answer do what was asked? Look at whether it is to the point, right, complete and clear. "
        "The lowest score is for an answer that is useless, the highest for one that an expert would not improve."
    ),
    "reference": (
        "A model was asked this:\n\n{{ question }}\n\nA right answer is:\n\n{{ reference }}\n\nIt answered:\n\n"
        "{{ answer }}\n\nDoes the answer say the same as the right one in all that matters? Form and length do not "
        "matter. The highest score is for an answer that does, the lowest for one that does not, or leaves it open."
    ),
}
_MENTIONS_THE_ANSWER: Final = "answer"


class InstructionsSection(Section):
    """How the verifier `instruction_following` counts."""

    score: Score = Score.SHARE
    """What an answer is worth: the share of instructions that it follows, or 1 only if it follows all."""
    matching: Matching = Matching.STRICT
    """Whether an answer is also looked at without its first or last line and its asterisks (`loose`)."""


class JudgeSection(Section):
    """Whom the verifier `judge` asks, by which rubric, and what that may cost."""

    url: Annotated[str, StringConstraints(pattern=r"^https?://[^?#@\s]+$", max_length=256)]
    """Of any server that speaks OpenAI's chat completions, an engine of ours among them; with or without `/v1`."""
    model: str | None = None
    """By default the first that the server lists."""
    key_variable: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """The environment variable that holds the bearer key; the key itself is in no recipe."""

    rubric: str = "quality"
    """`quality`, `reference`, or a template (Jinja, or {field}) over question, answer, reference and metadata."""
    low: float = 1.0
    high: float = 10.0
    """The scores that the judge may say; the reward is the score moved to 0…1."""
    pattern: str | None = None
    """A regular expression whose one group is the score; without it the judge replies with JSON."""

    votes: int = Field(default=1, ge=1, le=64)
    least_agreement: float = Field(default=0.0, ge=0, le=1)
    """1 − (highest vote − lowest) ÷ range must be so high, or the answer is not judged."""
    temperature: float = Field(default=0.0, ge=0, le=HOTTEST)
    max_tokens: int = Field(default=256, ge=1)
    most_chars: int = Field(default=20_000, ge=1)
    """So much of each text is shown to the judge."""

    timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Longest that a vote may take, all its tries together, from when its turn has come."""
    concurrency: int = Field(default=8, ge=1, le=1024)
    """Calls of one actor that are under way at once."""
    most_calls: int | None = Field(default=None, ge=1)
    """Of the whole run; each actor has an equal share. When it is spent, answers are masked."""
    most_tokens: int | None = Field(default=None, ge=1)
    """Of prompts and replies, as `most_calls`."""
    remembered: int = Field(default=10_000, ge=0, le=1_000_000)
    """Verdicts that an actor keeps, so that an equal answer to an equal question is not judged again."""

    @field_validator("url")
    @classmethod
    def _is_base(cls, url: str) -> str:
        return url.rstrip("/").removesuffix("/v1").rstrip("/")

    @field_validator("rubric")
    @classmethod
    def _asks_about_the_answer(cls, rubric: str) -> str:
        try:
            template = Template(RUBRICS.get(rubric, rubric), where="rubric")
        except RecipeError as error:
            raise ValueError(str(error)) from None
        if _MENTIONS_THE_ANSWER not in template.fields:
            raise ValueError(
                f"must be {' or '.join(RUBRICS)}, or a template that holds {{{{ answer }}}}, got {rubric!r}"
            )
        return rubric

    @field_validator("pattern")
    @classmethod
    def _has_one_group(cls, pattern: str | None) -> str | None:
        try:
            groups = 1 if pattern is None else re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"must be a regular expression: {error}") from None
        if groups != 1:
            raise ValueError(f"must have one group, the score, got {groups} groups")
        return pattern

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"judge.low must be below judge.high, got {self.low:g} and {self.high:g}")
        if self.votes > 1 and self.temperature == 0:
            raise ValueError("judge.temperature must be above 0 where there are several votes: they would be one")
        return self

    @property
    def template(self) -> Template:
        """The rubric."""
        return Template(RUBRICS.get(self.rubric, self.rubric), where="rubric")

    @property
    def key(self) -> SecretStr | None:
        """The bearer key. Raises `RecipeError` where its variable is not set."""
        if self.key_variable is None:
            return None
        key = os.environ.get(self.key_variable)
        if not key:
            raise RecipeError(f"judge.key_variable names ${self.key_variable}, which is not set in this environment")
        return SecretStr(key)
