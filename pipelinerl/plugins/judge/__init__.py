"""A language model as the verifier of answers (LLM as a judge): its options in a recipe, and the built-in rubrics."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Final, Literal, Self, get_args

from pydantic import Field, StringConstraints, field_validator, model_validator

from pipelinerl.component import VerifierComponent
from pipelinerl.data.prompts import Template
from pipelinerl.enums import HOTTEST
from pipelinerl.errors import RecipeError
from pipelinerl.section import Section
from pipelinerl.system.secret_variables import read_secret

#: Built-in rubrics for LLM judges, by name.
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
RequestField = Literal["max_tokens", "temperature", "top_p", "seed"]
#: Fields of a judge's request that cannot be renamed.
_OTHER_FIELDS: Final = ("model", "messages", "stop")


@lru_cache(maxsize=64)
def _template(rubric: str) -> Template:
    return Template(RUBRICS.get(rubric, rubric), where="rubric")


class JudgeSection(Section):
    """Settings of the verifier `judge`: the judge model, its rubric, and limits on cost."""

    url: Annotated[str, StringConstraints(pattern=r"^https?://[^?#@\s]+$", max_length=256)]
    """Base URL of a server with OpenAI's chat completions, such as an engine of this project; with or without `/v1`."""
    model: str | None = None
    """Name of the judge model; by default the first model that the server lists."""
    key_variable: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Name of the environment variable with the bearer key; recipes never contain the key itself."""

    rubric: str = "quality"
    """`quality`, `reference`, or a template (Jinja, or {field}) over question, answer, reference and metadata."""
    low: float = 1.0
    high: float = 10.0
    """The range of the judge's scores, `low` to `high`; the reward is the score scaled to 0…1."""
    pattern: str | None = None
    """A regular expression with one group, the score; by default the judge replies with JSON."""

    request_fields: dict[RequestField, Annotated[str, StringConstraints(pattern=r"^\w*$", max_length=64)]] = Field(
        default_factory=dict
    )
    """Other names of the request's fields, for servers that reject the usual ones; "" leaves a field out."""

    votes: int = Field(default=1, ge=1, le=64)
    """Judge replies per answer; several need a temperature above 0."""
    least_agreement: float = Field(default=0.0, ge=0, le=1)
    """The least agreement of the votes, 1 − (highest − lowest) ÷ range; below it the answer is not judged."""
    temperature: float = Field(default=0.0, ge=0, le=HOTTEST)
    """Sampling temperature of the judge."""
    max_tokens: int = Field(default=256, ge=1)
    """The most tokens of one reply."""
    most_chars: int = Field(default=20_000, ge=1)
    """The most characters of each text that the judge sees."""

    timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Time limit of one vote, from the start of its first attempt and including all retries."""
    concurrency: int = Field(default=8, ge=1, le=1024)
    """Concurrent judge calls per actor."""
    most_calls: int | None = Field(default=None, ge=1)
    """Budget of judge calls for the whole run, divided equally among actors. Once it is used up, answers are masked."""
    most_tokens: int | None = Field(default=None, ge=1)
    """Budget of prompt and reply tokens for the whole run, divided like `most_calls`."""
    remembered: int = Field(default=10_000, ge=0, le=1_000_000)
    """Verdicts cached per actor, so that an identical answer to the same question is not judged again."""

    @field_validator("url")
    @classmethod
    def _is_base(cls, url: str) -> str:
        return url.rstrip("/").removesuffix("/v1").rstrip("/")

    @field_validator("rubric")
    @classmethod
    def _asks_about_the_answer(cls, rubric: str) -> str:
        try:
            template = _template(rubric)
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
        names = [
            *_OTHER_FIELDS,
            *filter(None, (self.request_fields.get(each, each) for each in get_args(RequestField))),
        ]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"judge.request_fields must give each field a name of its own, got {twice[0]!r} twice")
        if self.votes > 1 and self.temperature == 0:
            raise ValueError("judge.temperature must be above 0 with several votes, which would all be equal")
        return self

    @property
    def template(self) -> Template:
        """The template of the prompt with which the judge model scores an answer by the rubric."""
        return _template(self.rubric)

    @property
    def token(self) -> str | None:
        """The bearer key of the judge's server, or None; raises `RecipeError` if the variable for it is not set."""
        if self.key_variable is None:
            return None
        key = read_secret(self.key_variable)
        if not key:
            raise RecipeError(f"judge.key_variable names ${self.key_variable}, which is not set in this environment")
        return key


COMPONENT: Final = VerifierComponent(
    build="pipelinerl.plugins.judge.verifier:open_judge",
    section=JudgeSection,
    trial={"votes": 1},
    needs_reference=False,
)
