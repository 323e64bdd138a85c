"""The values that flow through the pipeline: frozen, no I/O.

    Problem ─▶ PromptOrder ─▶ (engine) Completion ─▶ (verifier) Verdict ─▶ Rollout ─▶ RolloutGroup ─▶ MicroBatch

Letters in shapes: C context tokens that the environment wrote, N tokens that the model sampled, G samples of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    """One task: a prompt, and the `ground_truth` with which the domain's verifier compares answers.

    `metadata` is for verifiers, environments and prompt templates. Metrics are split by `tags`, such as
    `subject=algebra`, in addition to the domain.
    """

    problem_id: str
    domain: str
    messages: tuple[Message, ...]
    ground_truth: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()


class ProblemSummary(NamedTuple):
    """The part of a problem that is kept with its group; `ground_truth` is cut to `MOST_SHOWN` characters."""

    problem_id: str = ""
    tags: tuple[str, ...] = ()
    ground_truth: str = ""


_UNNAMED: Final = ProblemSummary()

#: Maximum number of characters of a text that is kept only for display.
MOST_SHOWN: Final = 1000


class Quota(NamedTuple):
    """Rule for mixing domains: from order number `since` on, each `size` orders (a step's groups) have exact shares."""

    since: int
    size: int


class Purpose(StrEnum):
    """The purpose of an order for a prompt: its samples are trained on or evaluated."""

    TRAINING = "training"
    EVALUATION = "evaluation"


class Priority(IntEnum):
    """Priority of a request in an engine's queue; requests with the lowest value begin first."""

    PROOF = -2
    """A canary check: the trainer waits for it, and the engine may do no other work before it."""
    EVALUATION = -1
    """An evaluation's samples: weight updates are on hold, or an engine is pinned, until the evaluation ends."""
    TRAINING = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of a `PromptOrder`. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep every token."""

    num_samples: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()

    @property
    def truncates(self) -> bool:
        """True if tokens that the policy may choose could be dropped before sampling."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainSampling:
    """Sampling parameters of a domain; None means the run's value. `chat_template_kwargs` are for the chat template."""

    group_size: int | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    chat_template_kwargs: Mapping[str, bool | int | float | str] = field(default_factory=dict)

    def of(self, run: Sampling) -> Sampling:
        """Return the domain's sampling, given the run's."""
        return replace(
            run,
            num_samples=self.group_size or run.num_samples,
            temperature=run.temperature if self.temperature is None else self.temperature,
            max_tokens=self.max_tokens or run.max_tokens,
            stop=run.stop if self.stop is None else self.stop,
        )


class IssuedAt(NamedTuple):
    """The epoch (number of the trainer's start) and the weights' version at the time when an order was issued."""

    epoch: int = 0
    version: int = 0


_NOWHERE: Final = IssuedAt()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOrder:
    """The controller's order to sample one problem G times.

    `order_id` is deterministic (`prompt-000123`, `eval-40-2-000007`), so an order that arrives twice is recognised.
    `index` is the order's position among the training orders, or among the questions of its evaluation. `seed`
    determines the sampling noise. If `engine` (base URL) is set, only that engine may answer.
    """

    order_id: str
    index: int
    purpose: Purpose
    problem: Problem
    sampling: Sampling
    seed: int
    engine: str = ""
    chat_template_kwargs: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    issued_at: IssuedAt = _NOWHERE

    @property
    def needs_policy_logprobs(self) -> bool:
        """True if the log-probs of the distribution sampled from would not be those that the trainer recomputes."""
        return self.purpose is Purpose.TRAINING and self.sampling.truncates


@dataclass(frozen=True, slots=True)
class Answered:
    """A completion, and the base URL of the engine that finished it; `others` sampled some of its tokens before.

    `tokens_kept` counts tokens that other engines sampled before they failed or left; `tokens_resampled` counts tokens
    of such engines that were lost and sampled again.
    """

    completion: ChatCompletion
    url: str
    tokens_kept: int = 0
    tokens_resampled: int = 0
    others: tuple[str, ...] = ()


class VersionSpan(NamedTuple):
    """`num_tokens` consecutive tokens that were sampled by version `model_version`."""

    model_version: int
    num_tokens: int


class Outcome(StrEnum):
    """A verifier's outcome. `timeout` and `verifier_error` say nothing about the answer: such rollouts are masked."""

    CORRECT = "correct"
    PARTIAL = "partial"
    """Judged as not correct, with a reward above 0: trained by its reward, and counted as wrong in accuracies."""
    WRONG = "wrong"
    TIMEOUT = "timeout"
    VERIFIER_ERROR = "verifier_error"

    @property
    def is_judgement(self) -> bool:
        """True if the outcome says something about the answer, so that the reward is meaningful."""
        return self in (Outcome.CORRECT, Outcome.PARTIAL, Outcome.WRONG)


class RewardPart(NamedTuple):
    """One term of a domain's reward."""

    name: str
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A verifier's result; `reward` is meaningless if the outcome is a timeout or an error.

    Attributes:
        answer: the extracted answer, normalised so that equal answers are equal strings, for majority votes; empty if
            the verifier extracts none.
        parts: the terms of a reward that is a weighted sum, by name and before weighting.
    """

    outcome: Outcome
    reward: float
    reason: str = ""
    answer: str = ""
    parts: tuple[RewardPart, ...] = ()


class TurnNote(NamedTuple):
    """Facts about a turn of an episode, in addition to its tokens.

    Attributes:
        reward: the environment's reward for this turn, which is part of the verdict's reward.
        agent: name of the agent that requested the turn.
        begins: why the turn begins a new segment (`NewSegment` of the plug-in `episodes`); empty if it begins none.
    """

    reward: float = 0.0
    agent: str = ""
    begins: str = ""


#: The note of every turn outside episodes: no reward, no agent.
NO_NOTE: Final = TurnNote()


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Text written by the environment, followed by the model's sampled tokens.

    Attributes:
        context_token_ids: i32 [C], the prompt (first turn) or a tool's answer (later turns), with template tokens.
        token_ids: i32 [N], the sampled tokens.
        behavior_logprobs: f32 [N], the sampler's log-probs.
        spans: version spans whose lengths sum to N.
        routed_experts: u8 or u16 [N, layers, top_k], the MoE experts of the token before each sampled token, if the
            engine reported them.
        context_routed_experts: [C, layers, top_k], the MoE experts of the token before each context token; meaningless
            for the first token of a rollout.
        note: in an episode, the turn's reward, its agent, and why it begins a segment.
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
        return self.note.reward

    @property
    def agent(self) -> str:
        return self.note.agent

    @property
    def begins(self) -> str:
        """The reason why the turn begins a new segment; empty if it continues a segment."""
        return self.note.begins


#: The parent of a turn that continues no other turn.
ROOT: Final = -1


class Segment(NamedTuple):
    """One sequence to train on: a path through a rollout's turns, from the beginning of a conversation to its end.

    Attributes:
        turns: the turns of the path, in order.
        trained: numbers, within the rollout, of the turns that are trained in this segment: the last turns of the path.
            The turns before them are trained in an earlier segment and are only context here.
    """

    turns: tuple[Turn, ...]
    trained: Sequence[int]

    @property
    def num_repeated(self) -> int:
        """The number of turns at the segment's beginning that an earlier segment trains; context here."""
        return len(self.turns) - len(self.trained)

    @property
    def num_tokens(self) -> int:
        return sum(int(turn.context_token_ids.shape[0] + turn.token_ids.shape[0]) for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sample of a problem with its verdict.

    Attributes:
        turns: the model's turns that are trained on, each once, in the order in which the turns ended.
        parents: for each turn the number of the earlier turn that it continues, or `ROOT`; empty if every turn
            continues the previous one, so that the rollout is one segment. A turn's `context_token_ids` are the tokens
            after the end of its parent.
    """

    turns: tuple[Turn, ...]
    verdict: Verdict
    finish_reason: str
    temperature: float
    epoch: int = 0
    parents: tuple[int, ...] = ()

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The sequences to train on, by their last turns; a turn is trained in the first segment that contains it."""
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
        return min(span.model_version for turn in self.turns for span in turn.spans)

    @property
    def newest_version(self) -> int:
        return max(span.model_version for turn in self.turns for span in turn.spans)

    @property
    def mean_version(self) -> float:
        """The mean version over the tokens that the model sampled."""
        spans = [span for turn in self.turns for span in turn.spans]
        tokens = sum(span.num_tokens for span in spans)
        return sum(span.model_version * span.num_tokens for span in spans) / tokens

    @property
    def num_sampled_tokens(self) -> int:
        return sum(int(turn.token_ids.shape[0]) for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """The number of packed tokens, sampled and context; a beginning shared by segments counts once per segment."""
        if self.parents:
            return sum(segment.num_tokens for segment in self.segments)
        return sum(int(turn.context_token_ids.shape[0] + turn.token_ids.shape[0]) for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """The G rollouts that one order for a prompt requested.

    `group_id` is the order's id, by which duplicates are recognised. `refusal` says why the recipe's filter excludes
    the group from training; empty if the filter accepts the group. `issued_at` is copied from the order. `engines` are
    the base URLs of the engines that sampled tokens of the group; empty if they are unknown.
    """

    group_id: str
    index: int
    domain: str
    actor: str
    rollouts: tuple[Rollout, ...]
    problem: ProblemSummary = _UNNAMED
    refusal: str = ""
    issued_at: IssuedAt = _NOWHERE
    engines: tuple[str, ...] = ()

    @property
    def oldest_version(self) -> int:
        return min(rollout.oldest_version for rollout in self.rollouts)

    @property
    def epoch(self) -> int:
        """The oldest epoch (one start of the trainer) whose weights sampled a token of this group."""
        return min(rollout.epoch for rollout in self.rollouts)

    @property
    def num_tokens(self) -> int:
        return sum(rollout.num_tokens for rollout in self.rollouts)
