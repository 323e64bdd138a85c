"""Protocols for making the rollouts of an order; the actor treats single turns and episodes alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from inference_contract.schemas import ChatCompletionRequest
from pipelinerl.environments.episode import ToolCalls
from pipelinerl.types import Answered, PromptOrder, Rollout
from pipelinerl.verifiers.verifier import Judgement


class Sampler(Protocol):
    """Source of completions: an `EnginePool`."""

    async def complete(
        self, request: ChatCompletionRequest, *, begun: Callable[[], None], engine: str = "", near: str = ""
    ) -> Answered:
        """Return the answer of `engine`, or of any engine if None, after retries; raise if all engines failed. The
        engine `near` is preferred unless it is much busier than others. `begun` is called whenever an engine starts the
        answer from its first token.
        """
        ...


@dataclass(frozen=True, slots=True)
class MadeRollout:
    """A rollout, and the text of its last answer as the verifier read it."""

    rollout: Rollout
    text: str


class GroupProgress(Protocol):
    """Callbacks to the actor while a group is made."""

    def begun(self) -> None:
        """An engine starts to sample the group from its first token."""
        ...

    def handed_over(self, answered: Answered) -> None:
        """An engine finished an answer, which another engine may have begun."""
        ...

    def resampled(self, samples: int) -> None:
        """A weight update aborted `samples` samples, which will be sampled again."""
        ...

    def sampled(self, engine: str) -> None:
        """All samples have ended, the last of them at this engine (base URL)."""
        ...

    def judged(self, judgements: Sequence[Judgement], spans: Sequence[Sequence[tuple[int, int]]]) -> None:
        """All samples have verdicts; `spans` are the (version, number of tokens) pairs of each sample."""
        ...

    def played(self, calls: ToolCalls, environment_s: float) -> None:
        """An episode has ended, with the tool calls `calls` and `environment_s` seconds spent outside the model."""
        ...


class GroupMaker(Protocol):
    """Maker of the rollouts that an order for a prompt requests; they are single turns or episodes."""

    async def make(self, order: PromptOrder, progress: GroupProgress) -> Sequence[MadeRollout]:
        """Return an order's rollouts with their verdicts; raise ContractError or PipelineError if none can be made."""
        ...


@final
class Unwatched:
    """`GroupProgress` that ignores every event, for groups that are made outside an actor."""

    def begun(self) -> None:
        """Do nothing."""

    def handed_over(self, answered: Answered) -> None:
        """Do nothing."""

    def resampled(self, samples: int) -> None:
        """Do nothing."""

    def sampled(self, engine: str) -> None:
        """Do nothing."""

    def judged(self, judgements: Sequence[Judgement], spans: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Do nothing."""

    def played(self, calls: ToolCalls, environment_s: float) -> None:
        """Do nothing."""
