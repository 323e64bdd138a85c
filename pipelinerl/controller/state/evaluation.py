"""One evaluation: N held-out problems, n samples of each, by weights of one version where that is asked for.

An answer is all n samples of a problem. With a pin it counts only if every token of it was sampled by the pinned
version, as its version spans say; else it is discarded whole and asked for again with the same seed. What is sampled is
a function of seed and weights, so that asking again does not favour answers that are short or lucky. A problem that
failed is asked again likewise; those that end without an answer are told, since it is the long ones that fail.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import final

from pipelinerl import rng
from pipelinerl.choices import Pin
from pipelinerl.controller.state.answer_figures import (
    AnswerFigures,
    PassAt,
    figures_by_domain,
    figures_by_tag,
    figures_of,
)
from pipelinerl.messages import EvaluationDone


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """What is asked at each evaluation; `temperature` 0 is greedy.

    Attributes:
        problems: how many held-out problems; 0: no evaluations.
        max_tokens: 0: as in training, each domain its own.
        pass_at: the k of pass@k, each at most `samples`.
        hold_s: longest that `gate` postpones updates; then what has been answered is all.
        grace_s: an evaluation that gets no answer for so long ends with those it has.
        attempts: how often a problem is asked that fails, or whose answers are of other versions.
        restarts: how often an evaluation begins anew whose pin has broken.
    """

    problems: int
    max_tokens: int
    samples: int = 1
    temperature: float = 0.0
    pass_at: tuple[int, ...] = ()
    pin: Pin = Pin.AUTO
    hold_s: float = 60.0
    grace_s: float = 120.0
    attempts: int = 4
    restarts: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDue:
    """An evaluation that begins once `version`, or a later one, is served."""

    version: int
    restarts: int = 0
    discarded: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Accuracy over the judged problems with its 95 % interval, and which weights answered.

    Attributes:
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
    discarded: int = 0
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
            self.discarded += 1
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

    def result(self, *, version: int | None = None, seed: int = 0) -> EvaluationResult:
        """The figures so far, at the trainer's `version`; `seed` is that of the intervals."""
        done = [answer for _, answer in sorted(self.answers.items()) if answer is not None]
        seed, ks = rng.key(seed, self.model_version), self.plan.pass_at
        figures = figures_of(done, pass_at=ks, seed=seed)
        judged = figures.problems
        return EvaluationResult(
            model_version=self.model_version,
            accuracy=figures.accuracy,
            low=figures.low,
            high=figures.high,
            problems=self.plan.problems,
            unjudged=self.plan.problems - judged,
            version_min=min((answer.oldest_version for answer in done), default=self.model_version),
            version_max=max((answer.newest_version for answer in done), default=self.model_version),
            one_version=self.pin is not Pin.NONE,
            pin=self.pin,
            engine=self.engine,
            samples=self.plan.samples,
            temperature=self.plan.temperature,
            pass_at=figures.pass_at,
            incomplete=self._unanswered() if self.complete else self.given_up,
            discarded=self.discarded,
            restarts=self.restarts,
            steps_meanwhile=(self.model_version if version is None else version) - self.model_version,
            at_least=None
            if figures.accuracy is None
            else figures.accuracy * judged / (judged + self.problems - len(done)),
            majority_at=figures.majority_at,
            length_mean=figures.length_mean,
            length_p95=figures.length_p95,
            truncated=figures.truncated,
            by_domain=figures_by_domain(done, pass_at=ks, seed=seed),
            by_tag=figures_by_tag(done, pass_at=(), seed=seed),
        )

    def _unanswered(self) -> str:
        """How many of the problems that ended did so without an answer, in words; empty when none did."""
        failed = sum(answer is None for answer in self.answers.values())
        return f"{failed} of {self.problems} problems had no answer" if failed else ""
