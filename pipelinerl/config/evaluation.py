"""Recipe sections for evaluations: `[evaluation]`, and one `[[evaluations]]` table for each set.

`[evaluation]` holds the defaults of all sets, as `[sampling]` does for domains; a set overrides single keys. A recipe
without `[[evaluations]]` has one set, which `[evaluation]` describes completely.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, model_validator

from pipelinerl.enums import COLDEST, HOTTEST, Pin
from pipelinerl.section import Section

SplitName = Literal["held_out", "validation"]
T = TypeVar("T")
#: Type of the keys `pass_at`: the values of k for which pass@k is estimated.
PassAt = tuple[Annotated[int, Field(ge=1)], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """A set of held-out problems that are evaluated together, with all its settings resolved.

    Attributes:
        place: position among the recipe's sets; decisions of the run depend on the set at position 0.
        interval_steps: steps between evaluations of this set; None or 0 means the knob `evaluation_interval_steps`.
        max_tokens: token limit of an answer; None or 0 means each domain's training limit.
        temperature: sampling temperature; 0 is greedy.
        pass_at: the values of k for pass@k, each at most `samples`.
    """

    name: str = "held_out"
    place: int = 0
    domains: tuple[str, ...] = ()
    split: SplitName = "held_out"
    interval_steps: int | None = None
    problems: int
    max_tokens: int | None = None
    samples: int = 1
    temperature: float = 0.0
    pass_at: tuple[int, ...] = ()

    def faults(self, key: str) -> Iterator[str]:
        """Yield an error for each invalid or contradictory setting; `key` is the set's path in the recipe."""
        if 0 < self.temperature < COLDEST:
            yield f"{key}.temperature must be 0 or at least {COLDEST:g}, got {self.temperature:g}"
        if self.samples > 1 and self.temperature == 0:
            yield (
                f"{key}.samples ({self.samples}) of one problem are all the same at {key}.temperature = 0; "
                "give it a temperature, such as that of training, or take one sample"
            )
        if beyond := [k for k in self.pass_at if k > self.samples]:
            yield (
                f"{key}.pass_at names {', '.join(map(str, beyond))}, but pass@k can be estimated only from "
                f"{key}.samples ({self.samples}) of k or more; raise samples, or leave it out"
            )
        if len(set(self.pass_at)) != len(self.pass_at):
            yield f"{key}.pass_at must name each k once"


class EvaluationSection(Section):
    """Evaluation on held-out problems; choose hyper-parameters on `validation`, report `held_out`."""

    split: SplitName = "held_out"
    """The data split to evaluate."""
    interval_steps: int = Field(default=50, ge=1)
    """Steps between evaluations; the knob `evaluation_interval_steps` changes it."""
    problems: int = Field(default=512, ge=0)
    """Problems per set; 0 disables evaluations."""
    max_tokens: int | None = Field(default=None, ge=1)
    """The most tokens of one answer; by default as in training."""
    samples: int = Field(default=1, ge=1)
    """Samples per problem; more than one needs a temperature above 0."""
    temperature: float = Field(default=0.0, ge=0, le=HOTTEST)
    """Sampling temperature; 0 is greedy."""
    pass_at: PassAt = ()
    """The values of k for pass@k, each at most `samples`."""
    pin: Pin = Pin.AUTO
    """Method of ensuring that all answers come from one model version; see docs/use/evaluation.md."""
    hold_s: float = Field(default=60.0, gt=0)
    """The longest time for which pin = gate postpones weight updates."""

    def alone(self, domains: Sequence[str]) -> EvaluationSet:
        """Return the only evaluation set of a recipe without `[[evaluations]]`; it is named after its split."""
        return EvaluationSetSection(name=self.split).within(self, place=0, domains=domains)

    @model_validator(mode="after")
    def _can_be_estimated(self) -> Self:
        for sentence in self.alone(()).faults("evaluation"):
            raise ValueError(sentence)
        return self


class EvaluationSetSection(Section):
    """One of several evaluation sets; keys that are left out default to `[evaluation]`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    """Unique name of the set, as it appears in figures."""
    domains: tuple[str, ...] = ()
    """Names of the domains that provide the problems; by default all domains that are trained on."""
    split: SplitName | None = None
    """The data split to evaluate; by default `evaluation.split`."""
    interval_steps: int | None = Field(default=None, ge=1)
    """Steps between evaluations of this set; if given, the knob `evaluation_interval_steps` does not affect the set."""
    problems: int | None = Field(default=None, ge=1)
    """Problems of the set; by default `evaluation.problems`."""
    max_tokens: int | None = Field(default=None, ge=1)
    """The most tokens of one answer; by default `evaluation.max_tokens`."""
    samples: int | None = Field(default=None, ge=1)
    """Samples per problem; by default `evaluation.samples`."""
    temperature: float | None = Field(default=None, ge=0, le=HOTTEST)
    """Sampling temperature, 0 is greedy; by default `evaluation.temperature`."""
    pass_at: PassAt | None = None
    """The values of k for pass@k; by default `evaluation.pass_at`."""

    def within(self, common: EvaluationSection, *, place: int, domains: Sequence[str]) -> EvaluationSet:
        """Return this set with missing keys, except `interval_steps`, from `common`, and missing `domains`."""

        def own(value: T | None, default: T) -> T:
            return default if value is None else value

        return EvaluationSet(
            name=self.name,
            place=place,
            domains=self.domains or tuple(domains),
            split=own(self.split, common.split),
            # The interval of `common` is only a knob's initial value, and a set without an interval follows the knob.
            interval_steps=self.interval_steps,
            problems=own(self.problems, common.problems),
            max_tokens=own(self.max_tokens, common.max_tokens),
            samples=own(self.samples, common.samples),
            temperature=own(self.temperature, common.temperature),
            pass_at=own(self.pass_at, common.pass_at),
        )
