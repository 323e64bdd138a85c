"""`GroupMaker`: makes the rollouts of an order. What the actor does with them is the same, however they came about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from inference_contract.schemas import ChatCompletionRequest
from pipelinerl.types import Answered, PromptOrder, Rollout
from pipelinerl.verifiers.verifier import Judgement


class Sampler(Protocol):
    """Where completions come from: an `EnginePool`."""

    async def complete(
        self, request: ChatCompletionRequest, *, begun: Callable[[], None], engine: str = "", near: str = ""
    ) -> Answered:
        """The answer of some engine, or of that one, after retries; raises when all of them failed.

        `near` is the engine that is preferred while it is not much busier than others. `begun` is called whenever it
        is sampled from its first token on.
        """
        ...


@dataclass(frozen=True, slots=True)
class MadeRollout:
    """A rollout, and the text of its last answer as its verifier read it."""

    rollout: Rollout
    text: str


class GroupProgress(Protocol):
    """What the actor is told while a group is made."""

    def begun(self) -> None:
        """An engine samples the group from its first token on, now."""
        ...

    def handed_over(self, answered: Answered) -> None:
        """An engine has ended an answer, maybe one that another had begun."""
        ...

    def resampled(self, samples: int) -> None:
        """An update has aborted so many samples, which are sampled again."""
        ...

    def sampled(self, engine: str) -> None:
        """All samples have ended, the last of them at this engine (base URL)."""
        ...

    def judged(self, judgements: Sequence[Judgement], spans: Sequence[Sequence[tuple[int, int]]]) -> None:
        """All samples have their verdicts; `spans` are of (version, tokens), of each sample."""
        ...


class GroupMaker(Protocol):
    """Makes groups: of single turns, or of episodes."""

    async def make(self, order: PromptOrder, progress: GroupProgress) -> Sequence[MadeRollout]:
        """The rollouts of an order with their verdicts; raises ContractError or PipelineError when there are none."""
        ...


@final
class Unwatched:
    """`GroupProgress` of a group that no actor makes."""

    def begun(self) -> None:
        """Nothing ages."""

    def handed_over(self, answered: Answered) -> None:
        """Nothing is reported."""

    def resampled(self, samples: int) -> None:
        """Nothing is counted."""

    def sampled(self, engine: str) -> None:
        """Nothing is drawn."""

    def judged(self, judgements: Sequence[Judgement], spans: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Nothing is counted."""
