"""Protocols for making the rollouts of an order; the actor treats single turns and episodes alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from inference_contract.schemas import ChatCompletionRequest
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


@dataclass(slots=True)
class ToolCalls:
    """Counts of tool calls in answers to requests that offer tools; a malformed call stays in the answer's text."""

    offered: bool = False
    parsed: int = 0
    malformed: int = 0
    failed: int = 0
    """Number of calls of the recipe's tools that failed by the model's fault."""


@dataclass(slots=True)
class GroupProgress:
    """Counts and times of one group's making; the maker fills it in, and the actor reports it, even after an error.

    Attributes:
        on_begun: called before each request that samples the group from its first token.
        tokens_kept, tokens_resampled: tokens from engines that failed or left, as `Answered` counts them.
        resampled: the number of samples that weight updates aborted.
        engine, sampled_at: where (base URL) and when (Unix seconds) sampling ended; the last turn of episodes counts.
        engines: the base URLs of all engines that sampled tokens of the group.
        judgements: the verdicts of the samples.
        spans: for each sample, its (version, number of tokens) pairs.
        episodes: the tool calls of each episode that ended, and its seconds outside the model.
    """

    on_begun: Callable[[], None] = lambda: None
    tokens_kept: int = 0
    tokens_resampled: int = 0
    resampled: int = 0
    engine: str = ""
    sampled_at: float = 0.0
    engines: set[str] = field(default_factory=set)
    judgements: Sequence[Judgement] = ()
    spans: Sequence[Sequence[tuple[int, int]]] = ()
    episodes: list[tuple[ToolCalls, float]] = field(default_factory=list)

    def begin(self) -> None:
        """Call `on_begun`, unless a turn was sampled already: the group has begun then."""
        if not self.engine:
            self.on_begun()

    def hand_over(self, answered: Answered) -> None:
        """Note the engines of an answer, and count its tokens from engines that failed or left."""
        self.engines.update((answered.url, *answered.others))
        self.tokens_kept += answered.tokens_kept
        self.tokens_resampled += answered.tokens_resampled

    def end_sampling(self, engine: str) -> None:
        """Record that sampling ended now, at this engine."""
        self.engine, self.sampled_at = engine, time.time()


class GroupMaker(Protocol):
    """Maker of the rollouts that an order for a prompt requests; they are single turns or episodes."""

    async def make(self, order: PromptOrder, progress: GroupProgress) -> Sequence[MadeRollout]:
        """Return an order's rollouts with their verdicts; raise ContractError or PipelineError if none can be made."""
        ...


class EpisodeMaker(GroupMaker, Protocol):
    """`GroupMaker` of the domains whose rollouts are episodes; build it by `registry.GROUPS`."""

    def serve(self) -> AbstractAsyncContextManager[None]:
        """Serve the model to agents until the block ends."""
        ...

    async def start(self) -> None:
        """Start the processes that the first episodes need, before they are played."""
        ...

    async def close(self) -> None:
        """Stop all that `start` and `make` have started; verifiers stay open."""
        ...
