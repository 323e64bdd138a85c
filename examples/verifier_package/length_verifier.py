"""The verifier `length`: short answers get the reward 1, and the reward falls to 0 at twice the longest good length."""

from collections.abc import Iterable, Iterator

from pydantic import Field

from pipelinerl.component import VerifierComponent
from pipelinerl.section import Section
from pipelinerl.types import Problem, Verdict
from pipelinerl.verifiers.verifier import GroupVerifier, PerAnswerVerifier, VerifierContext, graded


class LengthSection(Section):
    """Options of the verifier: `length = { most_words = 20 }` in a domain."""

    most_words: int = Field(default=20, ge=1)
    """The longest answer with the reward 1, in words."""


class Length:
    def __init__(self, section: LengthSection, context: VerifierContext) -> None:
        self._most, self._correct_at = section.most_words, context.correct_at

    async def verify(self, problem: Problem, completion_text: str) -> Verdict:
        words = len(completion_text.split())
        reward = min(1.0, max(0.0, 2.0 - words / self._most))
        return Verdict(outcome=graded(reward, self._correct_at), reward=reward, reason=f"{words} words")


def open_length(section: LengthSection, context: VerifierContext) -> GroupVerifier:
    return PerAnswerVerifier(Length(section, context), deadline_s=context.deadline_s)


def findings(section: LengthSection, problems: Iterable[Problem]) -> Iterator[str]:
    longest = max(len(problem.ground_truth.split()) for problem in problems)
    yield f"reference answers have up to {longest} words, and most_words is {section.most_words}"


COMPONENT = VerifierComponent(
    build="length_verifier:open_length",
    section=LengthSection,
    deterministic=True,
    check="length_verifier:findings",
)
