"""Trials of a domain for `pipelinerl check`: call its verifier, and the filter of groups.

The verifier judges the reference answer and an empty answer; a verifier that may cost money, such as an LLM judge,
judges the reference answer only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pipelinerl import registry
from pipelinerl.component import imported
from pipelinerl.config.domains import DomainSection
from pipelinerl.data.mixture import Mixture
from pipelinerl.errors import RecipeError
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.roles.verification import open_verifier
from pipelinerl.types import Outcome, Problem
from pipelinerl.verifiers.group_filter import GroupFilter
from pipelinerl.verifiers.user_code import RewardFunction, parameters_of
from pipelinerl.verifiers.verdicts import judged
from pipelinerl.verifiers.verifier import GroupVerifier, Judgement, SampledAnswer, correct, wrong


def tool_format(tokenizer: ChatTokenizer) -> str:
    """Describe the format in which the chat template writes tool calls."""
    if tokenizer.call_style is None:
        return "writes no tool calls that can be parsed back, so requests with tools are rejected"
    return f"writes tool calls in the format of {tokenizer.call_style.form.name}, which is parsed"


#: A registered verifier is refused if it rejects the reference answers of this many problems.
_TRIED: Final = 16
_LEFT_OUT: Final = (
    "answers without a verdict are left out of the reward, which then looks better than it is; a reward function must "
    "return 0.0 for a wrong answer, not None"
)


async def verifier_tried(domain: DomainSection, problems: Mixture) -> list[tuple[str, str]]:
    """Return findings: the verdicts on the reference answer and on an empty answer, and warnings of missing verdicts.

    A function of the user's is also called on a wrong answer, the reference answer of another problem.

    Raises:
        RecipeError: neither answer can be judged, or verifiers that compare answers with the reference accept none of
            the first `_TRIED` reference answers.
    """
    where = f"domains.{domain.name}"
    registered = domain.registered_verifiers
    trials = {
        part.key or name: options.model_copy(update=part.trial)
        for name, part, options in registered
        if part.trial is not None
    }
    if trials:
        return [("verifier", await _tried_once(domain.model_copy(update=trials), problems, where=where))]
    verifier, unjudged = open_verifier(domain), list[tuple[str, str]]()
    try:
        truth, empty = [
            await _judged(verifier, problems.problem(0), text)
            for text in (reference_answer(domain, problems.problem(0)), "")
        ]
        if not (truth.verdict.outcome.is_judgement or empty.verdict.outcome.is_judgement):
            raise RecipeError(f"{where}.verifier cannot judge its problems: {truth.verdict.reason}")
        names = {name for _, name in domain.verifiers}
        if names <= {*registry.VERIFIERS.having("needs_reference")}:
            await _find_one_right(verifier, domain, problems, truth, where=where)
        tried = {"the reference answer": truth, "an empty answer": empty}
        is_user_code = any(registry.is_user_code(registry.VERIFIERS, name) for name in names)
        first = problems.problem(0).ground_truth
        others = (problems.problem(index).ground_truth for index in range(1, _TRIED))
        if is_user_code and (other := next((each for each in others if each and each != first), None)) is not None:
            tried["a wrong answer"] = await _judged(verifier, problems.problem(0), other)
        for what, judgement in tried.items():
            if not judgement.verdict.outcome.is_judgement:
                sentence = f"{where}: {what} got no verdict ({judgement.verdict.reason})"
                unjudged.append(("warning", f"{sentence}; {_LEFT_OUT}"))
    finally:
        await verifier.close()
    verdicts = f"of the reference answer {_summary(truth)}; of an empty answer {_summary(empty)}"
    return [("verifier", f"{where}: {verdicts}"), *unjudged]


def called_by_place(domain: DomainSection) -> Iterator[str]:
    """Yield a warning for each reward function whose first two parameters have unusual names.

    Parameters with unusual names are filled by position: the first with the problem, the second with the answer's text.
    The author of a function with the parameters `(response, label)` probably meant the answer and the ground truth.
    """
    for where, name in domain.verifiers:
        thing = imported(name) if registry.is_user_code(registry.VERIFIERS, name) else None
        if thing is not None and not hasattr(thing, "verify"):
            reward = RewardFunction.of_callable(thing)
            named = [parameter.name for parameter in parameters_of(thing)[: len(reward.by_place)]]
            if named and not (named[0] == "problem" and named[1].startswith("completion")):
                yield (
                    f"{where}: {named[0]} receives the problem and {named[1]} the text of the answer, by position; to "
                    "receive other values, use the names in docs/start/rewards.md: completion, answer, …"
                )


async def _tried_once(domain: DomainSection, problems: Mixture, *, where: str) -> str:
    verifier = open_verifier(domain)
    try:
        judgement = await _judged(verifier, problems.problem(0), problems.problem(0).ground_truth)
    finally:
        await verifier.close()
    if not judgement.verdict.outcome.is_judgement:
        raise RecipeError(f"{where}.verifier cannot judge: {judgement.verdict.reason}")
    return f"{where}: of the reference answer alone, because answers cost money, {_summary(judgement)}"


async def filter_tried(judge: GroupFilter, problem: Problem, *, samples: int) -> str:
    """Describe the filter's decision on an invented, half correct group; raise `RecipeError` if the filter fails."""
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


async def _find_one_right(
    verifier: GroupVerifier, domain: DomainSection, problems: Mixture, first: Judgement, *, where: str
) -> None:
    """Raise `RecipeError` if none of the first `_TRIED` reference answers is correct; `first` judges the first one."""
    if first.verdict.outcome is Outcome.CORRECT:
        return
    for problem in map(problems.problem, range(1, _TRIED)):
        reached = await _judged(verifier, problem, reference_answer(domain, problem))
        if reached.verdict.outcome is Outcome.CORRECT:
            return
    problem = problems.problem(0)
    raise RecipeError(
        f"{where}.verifier finds the reference answers of {_TRIED} problems wrong, such as {problem.ground_truth!r} to "
        f"{problem.messages[-1].content!r}; choose the verifier that belongs to the source"
    )


def reference_answer(domain: DomainSection, problem: Problem) -> str:
    """Return a right answer as a model would write it."""
    names = [name for _, name in domain.verifiers]
    verifier = registry.VERIFIERS.get(names[0]) if len(names) == 1 else None
    if verifier is not None and verifier.reference_answer:
        answer: str = imported(verifier.reference_answer)(problem)
        return answer
    return problem.ground_truth


async def _judged(verifier: GroupVerifier, problem: Problem, text: str) -> Judgement:
    (judgement,) = await judged(verifier, problem, [SampledAnswer(text)])
    return judgement


def _summary(judgement: Judgement) -> str:
    verdict, seconds = judgement
    reward = f", reward {verdict.reward:g}" if verdict.outcome.is_judgement else ""
    parts = f" ({', '.join(f'{part.name} {part.reward:g}' for part in verdict.parts)})" if verdict.parts else ""
    reason = f": {verdict.reason}" if verdict.reason else ""
    return f"{verdict.outcome}{reward}{parts} in {seconds:.3f} s{reason}"
