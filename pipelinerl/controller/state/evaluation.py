"""One evaluation: the problems of one or several sets, n samples of each, by weights of one version where asked for.

An answer is all n samples of a problem. With a pin it counts only if every token of it was sampled by the pinned
version, as its version spans say; else it is discarded whole and asked for again with the same seed. What is sampled is
a function of seed and weights, so that asking again does not favour answers that are short or lucky. A problem that
failed is asked again likewise; those that end without an answer are told, since it is the long ones that fail.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Self, final

from pipelinerl import rng
from pipelinerl.controller.state.answer_figures import (
    AnswerFigures,
    PassAt,
    figures_by_domain,
    figures_by_tag,
    figures_of,
)
from pipelinerl.enums import Pin
from pipelinerl.messages import EvaluationDone


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """Held-out problems that have one accuracy; `temperature` 0 is greedy.

    Attributes:
        place: among the recipe's sets; the first, 0, is the one that decisions go by.
        problems: how many.
        max_tokens: 0: as in training, each domain its own.
        pass_at: the k of pass@k, each at most `samples`.
        interval_steps: every so many steps it is asked; 0: as the knob says.
    """

    name: str = "held_out"
    place: int = 0
    problems: int
    max_tokens: int
    samples: int = 1
    temperature: float = 0.0
    pass_at: tuple[int, ...] = ()
    interval_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """What is asked at an evaluation, and how.

    Attributes:
        sets: whose problems are asked, one after the other, by the same weights; none: no evaluations.
        hold_s: longest that `gate` postpones updates; then what has been answered is all.
        grace_s: an evaluation that gets no answer for so long ends with those it has.
        attempts: how often a problem is asked that fails, or whose answers are of other versions.
        restarts: how often an evaluation begins anew whose pin has broken.
    """

    sets: tuple[EvaluationSet, ...]
    pin: Pin = Pin.AUTO
    hold_s: float = 60.0
    grace_s: float = 120.0
    attempts: int = 4
    restarts: int = 3

    @property
    def problems(self) -> int:
        """How many are asked in all."""
        return sum(each.problems for each in self.sets)

    def question(self, index: int) -> tuple[EvaluationSet, int]:
        """Question `index` < `problems`: of which set it is, and which of its problems."""
        for each in self.sets:
            if index < each.problems:
                return each, index
            index -= each.problems
        raise IndexError(f"a plan of {self.problems} problems has no question {self.problems + index}")

    def of(self, names: Collection[str]) -> Self:
        """The same of these sets alone."""
        return replace(self, sets=tuple(each for each in self.sets if each.name in names))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDue:
    """An evaluation of the sets of these names, which begins once `version`, or a later one, is served."""

    version: int
    sets: tuple[str, ...]
    restarts: int = 0
    discarded: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Accuracy over the judged problems of a set with its 95 % interval, and which weights answered.

    Attributes:
        name, place: of the set.
        accuracy: mean over problems of the share of their samples that is right (pass@1); it and its interval are None
            where nothing was judged.
        at_least: the accuracy if every problem that had no answer is taken for wrong; it is what decisions go by, since
            quick answers weigh too much in the other one where some are missing.
        unjudged: problems without any verdict.
        version_min, version_max: of all tokens that count; equal when `one_version`.
        one_version: was it made sure that every token is of `model_version`?
        pin, engine: how; the engine that answered alone.
        incomplete: why not every problem has its answer; empty: all have.
        discarded: answers that did not count, since a token was of another version.
        restarts: how often it began anew.
        steps_meanwhile: by how many steps the trainer was ahead at its end.
        majority_at, length_mean, length_p95, truncated: as `AnswerFigures` says.
        by_domain, by_tag: the same figures of each domain and, without pass@k and maj@k, of the tags that most problems
            have.
    """

    model_version: int
    name: str = "held_out"
    place: int = 0
    accuracy: float | None
    low: float | None
    high: float | None
    problems: int
    unjudged: int
    version_min: int
    version_max: int
    one_version: bool = False
    pin: Pin = Pin.NONE
    engine: str = ""
    samples: int = 1
    temperature: float = 0.0
    pass_at: list[PassAt] = field(default_factory=list)
    incomplete: str = ""
    discarded: int = 0
    restarts: int = 0
    steps_meanwhile: int = 0
    at_least: float | None = None
    majority_at: list[PassAt] = field(default_factory=list)
    length_mean: float | None = None
    length_p95: float | None = None
    truncated: float | None = None
    by_domain: dict[str, AnswerFigures] = field(default_factory=dict)
    by_tag: dict[str, AnswerFigures] = field(default_factory=dict)

    @property
    def without_groups(self) -> EvaluationResult:
        """What is remembered of it once a later one has ended: a run may have thousands."""
        return replace(self, by_domain={}, by_tag={})


@final
@dataclass(slots=True, kw_only=True)
class Evaluation:
    """Collects answers until every problem has one, or failed.

    `asked` counts questions by problem; those from `next_index` on have not been asked yet. `number` tells it from one
    of the same version that was given up, whose answers may still come.
    """

    model_version: int
    number: int
    plan: EvaluationPlan
    epoch: int = 0
    pin: Pin = Pin.NONE
    engine: str = ""
    held_since: float | None = None
    """When updates were first postponed for it; None while none has been."""
    heard_at: float = 0.0
    """When it began or last got an answer, on the controller's clock."""
    restarts: int = 0
    discarded: dict[str, int] = field(default_factory=dict)
    """Answers of other versions, by the name of their set."""
    given_up: str = ""
    """Why it ends with the answers that it has; empty while it goes on."""
    next_index: int = 0
    asked: dict[int, int] = field(default_factory=dict)
    answers: dict[int, EvaluationDone | None] = field(default_factory=dict)

    @property
    def problems(self) -> int:
        """How many problems it has."""
        return self.plan.problems

    @property
    def complete(self) -> bool:
        """Has every problem ended?"""
        return len(self.answers) >= self.plan.problems

    def concerns(self, order_id: str) -> bool:
        """Is this order one of its questions?"""
        return order_id.startswith(f"eval-{self.model_version}-{self.number}-")

    def accepts(self, answer: EvaluationDone) -> bool:
        """Is every token of it of the pinned version? Without a pin, all are welcome."""
        found = (answer.epoch, answer.oldest_version, answer.newest_version)
        return self.pin is Pin.NONE or found == (self.epoch, self.model_version, self.model_version)

    def add(self, index: int, answer: EvaluationDone | None, *, now: float) -> bool:
        """An answer, or None for a problem that failed; a repetition changes nothing. True: it must be asked again."""
        self.heard_at = now
        if index in self.answers:
            return False
        if answer is not None and not self.accepts(answer):
            name = self.plan.question(index)[0].name
            self.discarded[name] = self.discarded.get(name, 0) + 1
            answer = None
        asked = self.asked.get(index, 1)
        if answer is None and asked < self.plan.attempts:
            self.asked[index] = asked + 1
            return True
        self.answers[index] = answer
        return False

    def to_ask(self, window: int) -> list[int]:
        """The next problems, so that at most `window` are out; they count as asked."""
        first, out = self.next_index, self.next_index - len(self.answers)
        self.next_index = max(first, min(self.plan.problems, first + window - out))
        return list(range(first, self.next_index))

    def results(self, *, version: int | None = None, seed: int = 0) -> list[EvaluationResult]:
        """The figures of each set so far, at the trainer's `version`; `seed` is that of the intervals."""
        seed, first, found = rng.key(seed, self.model_version), 0, list[EvaluationResult]()
        ahead = (self.model_version if version is None else version) - self.model_version
        for asked in self.plan.sets:
            ended = [self.answers[index] for index in range(first, first + asked.problems) if index in self.answers]
            found.append(self._result(asked, ended, steps_meanwhile=ahead, seed=seed))
            first += asked.problems
        return found

    def _result(
        self, asked: EvaluationSet, ended: list[EvaluationDone | None], *, steps_meanwhile: int, seed: int
    ) -> EvaluationResult:
        """Of one set, whose problems that have ended are these, in their order."""
        done = [answer for answer in ended if answer is not None]
        figures = figures_of(done, pass_at=asked.pass_at, seed=seed)
        judged, failed = figures.problems, len(ended) - len(done)
        unanswered = f"{failed} of {asked.problems} problems had no answer" if failed else ""
        return EvaluationResult(
            model_version=self.model_version,
            name=asked.name,
            place=asked.place,
            accuracy=figures.accuracy,
            low=figures.low,
            high=figures.high,
            problems=asked.problems,
            unjudged=asked.problems - judged,
            version_min=min((answer.oldest_version for answer in done), default=self.model_version),
            version_max=max((answer.newest_version for answer in done), default=self.model_version),
            one_version=self.pin is not Pin.NONE,
            pin=self.pin,
            engine=self.engine,
            samples=asked.samples,
            temperature=asked.temperature,
            pass_at=figures.pass_at,
            incomplete=unanswered if len(ended) == asked.problems else self.given_up,
            discarded=self.discarded.get(asked.name, 0),
            restarts=self.restarts,
            steps_meanwhile=steps_meanwhile,
            at_least=None
            if figures.accuracy is None
            else figures.accuracy * judged / (judged + asked.problems - len(done)),
            majority_at=figures.majority_at,
            length_mean=figures.length_mean,
            length_p95=figures.length_p95,
            truncated=figures.truncated,
            by_domain=figures_by_domain(done, pass_at=asked.pass_at, seed=seed),
            by_tag=figures_by_tag(done, pass_at=(), seed=seed),
        )
