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
    """Source of completions; the actor's is an `EnginePool`."""

    async def complete(
        self,
        request: ChatCompletionRequest,
        *,
        begun: Callable[[], None],
        engine: str = "",
        near: str = "",
        on_text: Callable[[str], None] | None = None,
    ) -> Answered:
        """Return the answer of `engine` (if empty, of any engine), with retries; raise if all engines failed.

        The engine `near` is preferred unless it is much busier than others. `begun` is called before each request that
        samples the answer from its first token, instead of continuing it. `on_text` gets the text so far, as often as
        the sampler knows more of it; it starts over when another engine takes over.
        """
        ...


@dataclass(frozen=True, slots=True)
class MadeRollout:
    """A rollout, and the text of its last answer as the verifier read it."""

    rollout: Rollout
    text: str


def _ignore(*_: object) -> None:
    pass


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    """Callbacks to the actor while a group is made; outside of an actor, every event is ignored.

    Attributes:
        begun: a request is sent that samples the group from its first token.
        handed_over: an answer is complete; `Answered` also counts its tokens from engines that failed or left.
        resampled: a weight update aborted this number of samples, which will be sampled again.
        sampled: sampling ended at this engine (base URL). Episodes report this per turn; the last report counts.
        judged: the samples have these verdicts and, per sample, these spans: (version, number of tokens) pairs.
        played: an episode has ended, with these tool calls and this number of seconds spent outside the model.
    """

    begun: Callable[[], None] = _ignore
    handed_over: Callable[[Answered], None] = _ignore
    resampled: Callable[[int], None] = _ignore
    sampled: Callable[[str], None] = _ignore
    judged: Callable[[Sequence[Judgement], Sequence[Sequence[tuple[int, int]]]], None] = _ignore
    played: Callable[[ToolCalls, float], None] = _ignore


class GroupMaker(Protocol):
    """Maker of the rollouts that an order for a prompt requests; they are single turns or episodes."""

    async def make(self, order: PromptOrder, progress: GroupProgress) -> Sequence[MadeRollout]:
        """Return an order's rollouts with their verdicts; raise ContractError or PipelineError if none can be made."""
        ...
