"""The values that flow through the pipeline: frozen, no I/O.

    Problem ─▶ PromptOrder ─▶ (engine) Completion ─▶ (verifier) Verdict ─▶ Rollout ─▶ RolloutGroup ─▶ MicroBatch

Letters in shapes: C context tokens that the environment wrote, N tokens that the model sampled, G samples of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_contract.schemas import ChatCompletion
from trainer_contract.types import Experts


class Message(NamedTuple):
    """One message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One task. `ground_truth` is what the domain's verifier compares with; `metadata` is for that verifier alone.

    `tags`, such as `subject=algebra`, are what figures are told apart by beside the domain.
    """

    problem_id: str
    domain: str
    messages: tuple[Message, ...]
    ground_truth: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()


class ProblemSummary(NamedTuple):
    """What a group tells of its problem, to those who count and read; its text is in the first turn's context.

    `ground_truth` is cut to `MOST_SHOWN` characters.
    """

    problem_id: str = ""
    tags: tuple[str, ...] = ()
    ground_truth: str = ""


_UNNAMED: Final = ProblemSummary()

#: So many characters of a text that nobody computes with are kept for readers.
MOST_SHOWN: Final = 1000


class Quota(NamedTuple):
    """From order `since` on, the domains' shares are kept within each `size` consecutive orders, a step's groups."""

    since: int
    size: int


class Purpose(StrEnum):
    """What the samples of an order are for."""

    TRAINING = "training"
    EVALUATION = "evaluation"


class Priority(IntEnum):
    """Which requests begin first at an engine where others wait: the lowest."""

    PROOF = -2
    """The trainer waits for it, and the engine has no work before it."""
    EVALUATION = -1
    """Updates, or an engine, wait for its end."""
    TRAINING = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How an order is to be sampled. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep every token."""

    num_samples: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainSampling:
    """What a domain has its own way: None is as the rest of the run. `chat_template_kwargs` go to the chat template."""

    group_size: int | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    chat_template_kwargs: Mapping[str, bool | int | float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOrder:
    """The controller's order to sample one problem G times.

    `order_id` is deterministic (`prompt-000123`, `eval-40-2-000007`): repeating an order is a no-op. `index` is its
    position in its sequence; `seed` keys the sampling noise. An `engine` (base URL) that is named answers alone.
    """

    order_id: str
    index: int
    purpose: Purpose
    problem: Problem
    sampling: Sampling
    seed: int
    engine: str = ""
    chat_template_kwargs: Mapping[str, bool | int | float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answered:
    """A completion, the engine (base URL) that ended it, and what it took from those that failed or left before.

    `tokens_kept` counts those of its tokens that such an engine sampled; `tokens_resampled` those that could not be
    gone on with, and were sampled again.
    """

    completion: ChatCompletion
    url: str
    tokens_kept: int = 0
    tokens_resampled: int = 0


class VersionSpan(NamedTuple):
    """`num_tokens` consecutive tokens were sampled by the weights `model_version`."""

    model_version: int
    num_tokens: int


class Outcome(StrEnum):
    """What a verifier found. `timeout` and `verifier_error` say nothing of the answer: such rollouts are masked."""

    CORRECT = "correct"
    PARTIAL = "partial"
    """Judged and not correct, with a reward above 0: it trains by its reward, and counts as not right in accuracies."""
    WRONG = "wrong"
    TIMEOUT = "timeout"
    VERIFIER_ERROR = "verifier_error"

    @property
    def is_judgement(self) -> bool:
        """Does the reward mean anything?"""
        return self in (Outcome.CORRECT, Outcome.PARTIAL, Outcome.WRONG)


class RewardPart(NamedTuple):
    """One of the rewards that a domain adds up."""

    name: str
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A verifier's finding; `reward` is meaningless unless the outcome is a judgement.

    Attributes:
        answer: what the verifier took for the answer, in a form in which equal answers are equal: majorities are
            counted by it. Empty where it has no such notion.
        parts: of a reward that is a weighted sum, each part by name, before its weight.
    """

    outcome: Outcome
    reward: float
    reason: str = ""
    answer: str = ""
    parts: tuple[RewardPart, ...] = ()


class TurnNote(NamedTuple):
    """What a turn of an episode has beside its tokens.

    Attributes:
        reward: what the environment gave this turn; part of the verdict's reward.
        agent: the name of the agent that asked.
        begins: why the turn begins a new segment, by `environments.episode.NewSegment`; empty where it continues one.
    """

    reward: float = 0.0
    agent: str = ""
    begins: str = ""


#: The note of every turn outside episodes.
NO_NOTE: Final = TurnNote()


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the environment wrote, then what the model sampled.

    Attributes:
        context_token_ids: i32 [C], prompt (first turn) or tool answer (later turns), template tokens included.
        token_ids: i32 [N]; behavior_logprobs: f32 [N]; spans: summing to N.
        routed_experts: u8 or u16 [N, layers, top_k], of the token before each, where the sampler tells;
            context_routed_experts: [C, layers, top_k], the same of the context, meaningless at the rollout's start.
        note: of an episode's turn its reward, its agent and why it begins a segment, which are properties, too.
    """

    context_token_ids: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    behavior_logprobs: NDArray[np.float32]
    spans: tuple[VersionSpan, ...]
    routed_experts: Experts | None = None
    context_routed_experts: Experts | None = None
    note: TurnNote = NO_NOTE

    @property
    def reward(self) -> float:
        """What the environment gave this turn."""
        return self.note.reward

    @property
    def agent(self) -> str:
        """The agent that asked; empty outside episodes."""
        return self.note.agent

    @property
    def begins(self) -> str:
        """The reason why it begins a new segment; empty where it continues one."""
        return self.note.begins


#: The parent of a turn that continues no other.
ROOT: Final = -1


class Segment(NamedTuple):
    """One sequence that trains: a path through a rollout's turns, from the beginning of a conversation to its end.

    Attributes:
        turns: the path.
        trained: numbers, within the rollout, of the last turns of the path, which train here. The turns before them
            train in an earlier segment of the rollout: here they are context.
    """

    turns: tuple[Turn, ...]
    trained: Sequence[int]

    @property
    def num_repeated(self) -> int:
        """The number of turns at the beginning that are context only."""
        return len(self.turns) - len(self.trained)

    @property
    def num_tokens(self) -> int:
        """All tokens of the path, those that only repeat included."""
        return sum(int(turn.context_token_ids.shape[0] + turn.token_ids.shape[0]) for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sample of a problem with its verdict.

    Attributes:
        turns: every turn of the model that trains, each once, in the order in which they ended.
        parents: for each turn the number of the turn that it continues, or `ROOT`; always lower than its own. Empty
            where every turn continues the one before, so that the rollout is one segment. A turn's
            `context_token_ids` are the tokens after the end of its parent.
    """

    turns: tuple[Turn, ...]
    verdict: Verdict
    finish_reason: str
    temperature: float
    epoch: int = 0
    parents: tuple[int, ...] = ()

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The sequences to train on: one for each turn that no other continues, in the order of these turns.

        Each turn trains in the first segment that contains it, so each sampled token trains exactly once.
        """
        if not self.parents:
            return (Segment(self.turns, range(len(self.turns))),)
        continued, seen = set(self.parents), set[int]()
        segments = []
        for leaf in range(len(self.turns)):
            if leaf in continued:
                continue
            path = [leaf]
            while (parent := self.parents[path[-1]]) != ROOT:
                path.append(parent)
            path.reverse()
            trained = tuple(number for number in path if number not in seen)
            seen.update(trained)
            segments.append(Segment(tuple(self.turns[number] for number in path), trained))
        return tuple(segments)

    @property
    def oldest_version(self) -> int:
        """The oldest weights that sampled any of its tokens."""
        return min(span.model_version for turn in self.turns for span in turn.spans)

    @property
    def newest_version(self) -> int:
        """The newest weights that sampled any of its tokens."""
        return max(span.model_version for turn in self.turns for span in turn.spans)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the model sampled."""
        return sum(int(turn.token_ids.shape[0]) for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """All tokens that are packed: the environment's too, and what several segments begin with once for each."""
        if self.parents:
            return sum(segment.num_tokens for segment in self.segments)
        return sum(int(turn.context_token_ids.shape[0] + turn.token_ids.shape[0]) for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """The G rollouts of one order. `group_id` is the order's id, by which duplicates are known; `refusal` says why the
    recipe's filter keeps the group out of training, if it does."""

    group_id: str
    index: int
    domain: str
    actor: str
    rollouts: tuple[Rollout, ...]
    problem: ProblemSummary = _UNNAMED
    refusal: str = ""

    @property
    def oldest_version(self) -> int:
        """The oldest weights that sampled any token of the group."""
        return min(rollout.oldest_version for rollout in self.rollouts)

    @property
    def epoch(self) -> int:
        """The oldest epoch in the group."""
        return min(rollout.epoch for rollout in self.rollouts)

    @property
    def num_tokens(self) -> int:
        """All tokens of the group."""
        return sum(rollout.num_tokens for rollout in self.rollouts)
