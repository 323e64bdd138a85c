"""Recipe sections for verification: a domain's verifiers and rewards, and their settings (docs/use/verification.md)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Final, Literal, Self, get_args

from pydantic import Field, SecretStr, StringConstraints, field_validator, model_validator

from pipelinerl.data.prompts import Template
from pipelinerl.enums import HOTTEST, VerifierLocation
from pipelinerl.errors import RecipeError
from pipelinerl.plugins.instructions.catalogue import Matching, Score
from pipelinerl.plugins.oubliette import toolchains
from pipelinerl.plugins.oubliette.checkers import Checker, CodeRules, Scoring
from pipelinerl.plugins.oubliette.runs import Tier
from pipelinerl.section import Section, shared_values
from pipelinerl.system.references import is_reference
from pipelinerl.system.secret_variables import read_secret


class VerificationSection(Section):
    """The processes that judge answers, and limits of verifier services; docs/use/verification.md."""

    services: int = Field(default=0, ge=0, le=256)
    """Verifier services that the launcher starts; with 0, each actor judges its own samples."""
    judged_in: VerifierLocation | None = None
    """The processes that judge answers, by default as `services` implies; needed only if services run elsewhere."""
    cache_mb: int = Field(default=64, ge=0, le=65_536)
    """Verdict cache of each service."""
    grace_s: float = Field(default=60.0, gt=0, le=3600)
    """The longest time for retrying an answer at other services after its service failed; then it is masked."""
    silence_s: float = Field(default=30.0, ge=5, le=3600)
    """Silence after which a service counts as failed."""
    timeout_s: float = Field(default=900.0, gt=0, le=86_400)
    """Time limit of a service for the answers to one problem, including its queue."""

    @property
    def uses_services(self) -> bool:
        """True if verifier services judge the answers, instead of the actors."""
        return bool(self.services) if self.judged_in is None else self.judged_in is VerifierLocation.SERVICES

    @model_validator(mode="after")
    def _are_used(self) -> Self:
        if self.services and not self.uses_services:
            raise ValueError(f'services ({self.services}) must be 0 where judged_in = "actors": they would be unused')
        return self


class RewardPartSection(Section):
    """One term of a domain's reward: a user's function, or a registered verifier."""

    function: str
    """A user's function (`path.py:name`), or the name of a registered verifier."""
    weight: float = 1.0
    """Factor of this term; must not be 0."""
    name: str = ""
    """Name of this term in figures; by default the name of the function."""

    @property
    def shown_as(self) -> str:
        """The name of this term in metrics."""
        return self.name or (self.function.rpartition(":")[2] if is_reference(self.function) else self.function)


def contradictions(verifier: str | None, rewards: tuple[RewardPartSection, ...]) -> Iterator[str]:
    """Yield a message for each contradiction between a domain's verifier and rewards."""
    if verifier is not None and rewards:
        yield "verifier and rewards exclude each other; name the verifier as one of rewards"
    names = [part.shown_as for part in rewards]
    if len(set(names)) != len(names):
        yield f"rewards must have unique names, got {', '.join(names)}; give each a name"
    if unweighted := [part.shown_as for part in rewards if part.weight == 0]:
        yield f"rewards.weight must not be 0, as it is for {', '.join(unweighted)}; leave it out"


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


class InstructionsSection(Section):
    """Scoring of answers by the verifier `instruction_following`."""

    score: Score = Score.SHARE
    """The reward: the share of instructions that the answer follows, or 1 only if it follows all."""
    matching: Matching = Matching.STRICT
    """With `loose`, the answer is also checked without its first or last line and without asterisks."""


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
        return Template(RUBRICS.get(self.rubric, self.rubric), where="rubric")

    @property
    def key(self) -> SecretStr | None:
        """The bearer key of the judge's server, or None; raises `RecipeError` if the variable for it is not set."""
        if self.key_variable is None:
            return None
        key = read_secret(self.key_variable)
        if not key:
            raise RecipeError(f"judge.key_variable names ${self.key_variable}, which is not set in this environment")
        return SecretStr(key)


class OublietteSection(Section):
    """Defaults of the verifier `oubliette`, a sandbox for programs; a problem's metadata may override them."""

    tier: Tier = Tier.DEFAULT
    """The strength of the sandbox's isolation; if it is unavailable, nothing is judged."""
    language: str = "python"
    """Language of a fenced code block that does not name its language."""
    languages: tuple[str, ...] = ()
    """Languages that are judged; by default `language` alone."""
    scoring: Scoring = Scoring.ALL
    """The reward: 1 if every test passes (`all`), or the share of passed tests (`share`)."""
    checker: Checker = Checker.TOKENS
    """Comparison of outputs: `exact`, `tokens`, `float`."""
    tolerance: float = Field(default=1e-6, ge=0, lt=1)
    """Tolerance of the checker `float`."""
    time_limit_s: float = Field(default=4.0, gt=0, le=600)
    """CPU time of one test; its wall-clock limit is twice that plus one second."""
    memory_mb: int = Field(default=512, ge=16, le=65536)
    """Memory of one test, shared by all its processes."""

    url: Annotated[str, StringConstraints(pattern=r"^(https?://.+)?$")] = ""
    """URL of an Oubliette service (`pipelinerl sandbox serve`); by default programs run on this machine."""
    key_variable: Annotated[str, StringConstraints(pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")] = ""
    """Name of the environment variable with the service's token."""
    repository: str = ""
    """Folder that holds the files that problems link to (`pipelinerl sandbox upload`), if there is no service."""

    @model_validator(mode="after")
    def _knows_languages(self) -> Self:
        for name in (self.language, *self.languages):
            if name not in toolchains.LANGUAGES:
                raise ValueError(f"language must be one of {', '.join(toolchains.LANGUAGES)}, got {name!r}")
        if self.languages and self.language not in self.languages:
            raise ValueError(f"languages must hold language ({self.language}), got {', '.join(self.languages)}")
        return self

    @property
    def rules(self) -> CodeRules:
        """The section's settings as `CodeRules`, the type that the verifier uses."""
        return CodeRules(
            **shared_values(self, CodeRules) | {"languages": self.languages or (self.language,)},
            memory_bytes=self.memory_mb << 20,
        )


#: The verifier of a domain that names no verifier.
DEFAULT_VERIFIER: Final = "math_answer"
