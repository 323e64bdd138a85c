"""One evaluation: n samples for each problem of one or more sets, optionally pinned to one model version.

An answer consists of all n samples of a problem. In a pinned evaluation, an answer counts only if every token was
sampled from the pinned version, as its version spans show; otherwise the whole answer is discarded and requested again
with the same seed. A sample is a function of seed and weights, so retries do not favour short or lucky answers. Failed
problems are also retried with the same seed. The number of problems that end without an answer is reported, since long
answers fail most often.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Final, Self

from pipelinerl import rng
from pipelinerl.config.evaluation import EvaluationSet
from pipelinerl.controller.state.answer_figures import (
    AnswerFigures,
    PassAt,
    figures_by_domain,
    figures_by_tag,
    figures_of,
)
from pipelinerl.enums import Pin
from pipelinerl.messages import EvaluationDone
from pipelinerl.observability.logs import without_secrets
from pipelinerl.observability.samples import AnswerRecord, SampleGroup, SampleKind
from pipelinerl.types import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """The sets of held-out problems in an evaluation, with limits on its duration and retries.

    Attributes:
        sets: sets whose problems are sampled in turn, from the same weights; without sets there are no evaluations.
        hold_s: the longest time for which pin mode `gate` postpones updates.
        grace_s: the longest time without a new answer. After `hold_s` or `grace_s`, the evaluation ends with the
            answers so far.
        attempts: the most attempts per problem; failures and answers from other versions also count.
        restarts: how often an evaluation may restart because its pin broke: weights changed, or its engine was lost.
    """

    sets: tuple[EvaluationSet, ...]
    pin: Pin = Pin.AUTO
    hold_s: float = 60.0
    grace_s: float = 120.0
    attempts: int = 4
    restarts: int = 3

    @property
    def problems(self) -> int:
        """The total number of problems in all sets."""
        return sum(each.problems for each in self.sets)

    def question(self, index: int) -> tuple[EvaluationSet, int]:
        """Return the set to which question `index` of the plan belongs, and the question's index within this set."""
        for each in self.sets:
            if index < each.problems:
                return each, index
            index -= each.problems
        raise IndexError(f"a plan of {self.problems} problems has no question {self.problems + index}")

    def of(self, names: Collection[str]) -> Self:
        """Return this plan, limited to the sets with the given names."""
        return replace(self, sets=tuple(each for each in self.sets if each.name in names))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDue:
    """A pending evaluation of the named sets; it begins once engines serve `version` or a later version."""

    version: int
    sets: tuple[str, ...]
    restarts: int = 0
    discarded: dict[str, int] = field(default_factory=dict)


#: The metrics that a result has in common with `AnswerFigures`.
_OF_THE_ANSWERS: Final = (
    "accuracy", "low", "high", "pass_at", "majority_at", "length_mean", "length_p95", "truncated",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Accuracy over the problems of a set that have verdicts, its 95 % interval, and the weights that were evaluated.

    Attributes:
        accuracy: mean over problems of the share of correct samples (pass@1). Accuracy and its interval are None if
            no problem has a verdict.
        at_least: the accuracy if every problem without an answer counts as wrong. Decisions use this value, because
            `accuracy` is biased towards quick answers when answers are missing.
        version_min, version_max: oldest and newest version of all counted tokens; equal if `one_version`.
        one_version: True if the pin ensured that every token was sampled by `model_version`.
        pin, engine: the pin mode, and the engine that answered all questions; empty if several engines answered.
        steps_meanwhile: how many steps the trainer was ahead of `model_version` when the evaluation ended.
        majority_at, length_mean, length_p95, truncated: as in `AnswerFigures`.
        by_domain, by_tag: the metrics of each domain, and of each of the tags with the most problems; tags have no
            pass@k and maj@k.
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


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """An evaluation in progress: collects answers until every problem has an answer or has failed.

    `asked` holds the number of attempts by problem index, for retried problems. Problems from `next_index` on have not
    been issued yet. The `number` is unique, so that late answers to an abandoned evaluation are recognised.
    """

    model_version: int
    number: int
    plan: EvaluationPlan
    epoch: int = 0
    pin: Pin = Pin.NONE
    engine: str = ""
    held_since: float | None = None
    """Time when updates were first postponed for this evaluation; None if they were not."""
    suspect_since: float | None = None
    """Time since which the pinned engine is suspect; None while it answers."""
    last_report_at: float = 0.0
    """Time when the evaluation began or last received an answer, on the controller's clock."""
    restarts: int = 0
    discarded: dict[str, int] = field(default_factory=dict)
    """The number of answers from other versions, by set name."""
    given_up: str = ""
    """Reason why the evaluation ends early with the answers received so far; empty while it continues."""
    next_index: int = 0
    asked: dict[int, int] = field(default_factory=dict)
    answers: dict[int, EvaluationDone | None] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """True if every problem has an answer or has failed."""
        return len(self.answers) >= self.plan.problems

    def concerns(self, order_id: str) -> bool:
        """Return True if the order belongs to this evaluation."""
        return order_id.startswith(f"eval-{self.model_version}-{self.number}-")

    def accepts(self, answer: EvaluationDone) -> bool:
        """Return True if the pinned version sampled every token of the answer; without a pin, always."""
        sampled_by = (answer.epoch, answer.oldest_version, answer.newest_version)
        return self.pin is Pin.NONE or sampled_by == (self.epoch, self.model_version, self.model_version)

    def add(self, index: int, answer: EvaluationDone | None, *, now: float) -> bool:
        """Record the answer to problem `index`, None if it failed; return True if the problem must be reissued instead.

        A failure or an answer from other weights leads to a reissue while attempts are left. A repeated answer is
        ignored.
        """
        self.last_report_at = now
        if index in self.answers:
            return False
        if answer is not None and not self.accepts(answer):
            name = self.plan.question(index)[0].name
            self.discarded[name] = self.discarded.get(name, 0) + 1
            answer = None
        attempts = self.asked.get(index, 1)
        if answer is None and attempts < self.plan.attempts:
            self.asked[index] = attempts + 1
            return True
        self.answers[index] = answer
        return False

    def next_questions(self, window: int) -> list[int]:
        """Return the next problems to issue so that at most `window` are in flight, and count them as issued."""
        first, out = self.next_index, self.next_index - len(self.answers)
        self.next_index = max(first, min(self.plan.problems, first + window - out))
        return list(range(first, self.next_index))

    def results(self, *, version: int | None = None, seed: int = 0) -> list[EvaluationResult]:
        """Return each set's result so far; `version` is the trainer's, and `seed` determines bootstrap intervals."""
        seed, first, results = rng.key(seed, self.model_version), 0, list[EvaluationResult]()
        ahead = (self.model_version if version is None else version) - self.model_version
        for each in self.plan.sets:
            ended = [self.answers[index] for index in range(first, first + each.problems) if index in self.answers]
            results.append(self._result(each, ended, steps_meanwhile=ahead, seed=seed))
            first += each.problems
        return results

    def _result(
        self, evaluation_set: EvaluationSet, ended: list[EvaluationDone | None], *, steps_meanwhile: int, seed: int
    ) -> EvaluationResult:
        done = [answer for answer in ended if answer is not None]
        figures = figures_of(done, pass_at=evaluation_set.pass_at, seed=seed)
        judged, failed = figures.problems, len(ended) - len(done)
        answerable = judged + evaluation_set.problems - len(done)
        at_least = None if figures.accuracy is None else figures.accuracy * judged / answerable
        unanswered = f"{failed} of {evaluation_set.problems} problems had no answer" if failed else ""
        return EvaluationResult(
            model_version=self.model_version,
            name=evaluation_set.name,
            place=evaluation_set.place,
            **{name: getattr(figures, name) for name in _OF_THE_ANSWERS},
            problems=evaluation_set.problems,
            unjudged=evaluation_set.problems - judged,
            version_min=min((answer.oldest_version for answer in done), default=self.model_version),
            version_max=max((answer.newest_version for answer in done), default=self.model_version),
            one_version=self.pin is not Pin.NONE,
            pin=self.pin,
            engine=self.engine,
            samples=evaluation_set.samples,
            temperature=evaluation_set.temperature,
            incomplete=unanswered if len(ended) == evaluation_set.problems else self.given_up,
            discarded=self.discarded.get(evaluation_set.name, 0),
            restarts=self.restarts,
            steps_meanwhile=steps_meanwhile,
            at_least=at_least,
            by_domain=figures_by_domain(done, pass_at=evaluation_set.pass_at, seed=seed),
            by_tag=figures_by_tag(done, pass_at=(), seed=seed),
        )


# --- samples of the answers -------------------------------------------------------------------------------------------

_JUDGED: Final = frozenset(outcome.value for outcome in Outcome if outcome.is_judgement)


def samples_of(report: EvaluationDone, *, current: Evaluation | None, time: float) -> Callable[[], list[SampleGroup]]:
    """Return a function that builds entries of the sample log from a report's answers; any thread may call it."""
    version = report.newest_version if current is None else current.model_version
    is_current = current is not None and current.concerns(report.order_id)
    name = current.plan.question(report.index)[0].name if is_current and current is not None else ""

    def build() -> list[SampleGroup]:
        if report.shown is None:
            return []
        answers = tuple(
            AnswerRecord(
                text=answer.text,
                outcome=answer.outcome,
                reward=answer.reward if answer.outcome in _JUDGED else None,
                reason=without_secrets(answer.reason),
                length=answer.num_tokens,
                finish_reason=answer.finish_reason,
                spans=tuple(answer.spans),
            )
            for answer in report.shown.answers
        )
        sample = SampleGroup(
            kind=SampleKind.EVALUATION,
            step=version,
            time=time,
            group_id=report.order_id,
            domain=report.domain,
            evaluation=name,
            problem_id=report.shown.problem_id,
            tags=tuple(report.tags),
            prompt=report.shown.prompt,
            ground_truth=report.shown.ground_truth,
            answers=answers,
        )
        return [sample]

    return build
