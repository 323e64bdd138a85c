"""A trial of a domain's verifier on a real problem for `pipelinerl check`, with the reference answer and an empty
answer.

An LLM judge may cost money, so it casts only one vote, and only on the reference answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pipelinerl import registry
from pipelinerl.config.domains import DomainSection
from pipelinerl.data.mixture import Mixture
from pipelinerl.errors import RecipeError
from pipelinerl.roles.verification import names_of, open_verifier
from pipelinerl.types import Outcome, Problem
from pipelinerl.verifiers.group_filter import GroupFilter
from pipelinerl.verifiers.user_code import RewardFunction, parameters_of
from pipelinerl.verifiers.verifier import GroupVerifier, Judgement, SampledAnswer, correct, wrong

#: A registered verifier is refused if it rejects the reference answers of this many problems.
_TRIED: Final = 16


async def tried(domain: DomainSection, problems: Mixture) -> str:
    """Describe the verdicts on the reference answer and on an empty answer.

    Raises:
        RecipeError: neither can be judged, or only registered verifiers judge and they reject every reference answer.
    """
    where = f"domains.{domain.name}"
    if domain.judge is not None:
        return await _tried_once(domain, problems, where=where)
    verifier = open_verifier(domain)
    try:
        truth, empty = [await _judged(verifier, problems.problem(0), text) for text in (None, "")]
        if not (truth.verdict.outcome.is_judgement or empty.verdict.outcome.is_judgement):
            raise RecipeError(f"{where}.verifier cannot judge its problems: {truth.verdict.reason}")
        names = {name for _, name in names_of(domain)}
        if names <= registry.VERIFIERS.keys() - registry.WITHOUT_REFERENCE:
            await _find_one_right(verifier, problems, truth, where=where)
    finally:
        await verifier.close()
    return f"of the reference answer {_summary(truth)}; of an empty answer {_summary(empty)}"


def called_by_place(domain: DomainSection) -> Iterator[str]:
    """Yield a warning for each reward function whose first two parameters have unusual names and are passed by
    position.

    They receive the problem and the answer's text, but the author of `(response, label)` may have meant the answer
    and the ground truth.
    """
    for where, name in names_of(domain):
        thing = registry.resolve(name) if registry.is_user_code(registry.VERIFIERS, name) else None
        if thing is not None and not hasattr(thing, "verify"):
            reward = RewardFunction.of_callable(thing)
            named = [parameter.name for parameter in parameters_of(thing)[: len(reward.by_place)]]
            if named and not (named[0] == "problem" and named[1].startswith("completion")):
                yield (
                    f"{where}: {named[0]} receives the problem and {named[1]} the text of the answer, by position; to "
                    "receive other values, use the names in docs/start/rewards.md: completion, answer, …"
                )


async def _tried_once(domain: DomainSection, problems: Mixture, *, where: str) -> str:
    """Describe the LLM judge's verdict on the reference answer by a single vote, which is enough to test the judge."""
    once = domain.model_copy(update={"judge": domain.judge and domain.judge.model_copy(update={"votes": 1})})
    verifier = open_verifier(once)
    try:
        judgement = await _judged(verifier, problems.problem(0), None)
    finally:
        await verifier.close()
    if not judgement.verdict.outcome.is_judgement:
        raise RecipeError(f"{where}.judge cannot judge: {judgement.verdict.reason}")
    return f"of the reference answer, by one vote, {_summary(judgement)}"


async def filter_tried(judge: GroupFilter, problem: Problem, *, samples: int) -> str:
    """Describe what the recipe's group filter decides on a made-up group for a real problem: half correct, half empty.

    Raises:
        RecipeError: the filter fails.
    """
    right = SampledAnswer(problem.ground_truth, range(1, len(problem.ground_truth) + 1))
    answers = [right if place < (samples + 1) // 2 else SampledAnswer("", (1,), "length") for place in range(samples)]
    verdicts = [correct(answer.text) if answer.text else wrong("no answer") for answer in answers]
    try:
        verdict, seconds = await judge.judge(problem, answers, verdicts)
    finally:
        await judge.close()
    if not verdict.outcome.is_judgement:
        raise RecipeError(f"curation.filter cannot judge a group: {verdict.reason}")
    decision = f"filters it: {verdict.reason}" if verdict.outcome is Outcome.WRONG else "keeps it"
    half = f"{sum(each.outcome is Outcome.CORRECT for each in verdicts)} of {samples} right"
    return f"curation.filter, of a made-up group of {problem.domain}, {half}: {decision}, in {seconds:.3f} s"


async def _find_one_right(verifier: GroupVerifier, problems: Mixture, first: Judgement, *, where: str) -> None:
    """Check that the verifier accepts the reference answer of at least one problem; `first` is its verdict on the
    first.

    Raises:
        RecipeError: it rejects the reference answers of all `_TRIED` problems.
    """
    if first.verdict.outcome is Outcome.CORRECT:
        return
    for index in range(1, _TRIED):
        if (await _judged(verifier, problems.problem(index), None)).verdict.outcome is Outcome.CORRECT:
            return
    problem = problems.problem(0)
    raise RecipeError(
        f"{where}.verifier finds the reference answers of {_TRIED} problems wrong, such as {problem.ground_truth!r} to "
        f"{problem.messages[-1].content!r}; choose the verifier that belongs to the source"
    )


async def _judged(verifier: GroupVerifier, problem: Problem, text: str | None) -> Judgement:
    (judgement,) = await verifier.judge(problem, [SampledAnswer(problem.ground_truth if text is None else text)])
    return judgement


def _summary(judgement: Judgement) -> str:
    verdict, seconds = judgement
    reward = f", reward {verdict.reward:g}" if verdict.outcome.is_judgement else ""
    parts = f" ({', '.join(f'{part.name} {part.reward:g}' for part in verdict.parts)})" if verdict.parts else ""
    reason = f": {verdict.reason}" if verdict.reason else ""
    return f"{verdict.outcome}{reward}{parts} in {seconds:.3f} s{reason}"
