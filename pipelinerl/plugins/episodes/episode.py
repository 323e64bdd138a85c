"""The turns of one episode, matched with the messages that its agents send. Without I/O.

In OpenAI's API, each request holds all messages of the conversation. The tokens of its longest prefix that ends in an
answer of the model are already known. The engine continues these tokens with the messages that follow the prefix:

    request ─▶ `plan` ─▶ engine ─▶ `record` ─▶ answer

Each sampled token is recorded once. The controller's `PromptOrder`, which requests the episode, overrides an agent's
sampling parameters; an agent can only lower the token limit. An answer is abandoned if its agent repeats the request
without reading the answer. A segment is a run of turns that share their tokens. A new segment begins where the history
that an agent sends differs from the sampled history, or where the chat template renders earlier turns differently.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from inference_contract.errors import InvalidRequest
from inference_contract.schemas import (
    AssistantMessage,
    ChatCompletion,
    ChatCompletionRequest,
    ChatMessage,
    Choice,
    FinishReason,
)
from pipelinerl import rng
from pipelinerl.actor.group_maker import ToolCalls
from pipelinerl.answers.thinking import split
from pipelinerl.answers.tool_calls import num_unparsed
from pipelinerl.config.domains import EpisodeSection
from pipelinerl.enums import History
from pipelinerl.errors import RecordError
from pipelinerl.types import ROOT, Priority, PromptOrder, Purpose, Rollout, Turn, TurnNote, Verdict, VersionSpan

#: Parameters of an agent's request that the `PromptOrder` overrides; they are dropped and counted.
_SAMPLING: Final = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty",
        "repetition_penalty", "logit_bias", "priority", "ignore_eos", "thinking", "reasoning_effort", "verbosity",
    }
)  # fmt: skip
_NO_TOKENS: Final = np.zeros(0, np.int32)
#: Fields of an engine's request that only the gateway may set.
_GATEWAY_FIELDS: Final = frozenset(
    {
        "prompt_token_ids", "prefixes", "return_token_ids", "return_routed_experts", "policy_logprobs",
        "continue_token_ids", "continue_from",
    }
)  # fmt: skip


class NewSegment(StrEnum):
    """Reason why a turn begins a new segment."""

    FIRST = "first"
    """It is the first turn of its agent."""
    HISTORY_DIFFERS = "history_differs"
    """No earlier turn has these messages, because the agent changed or compacted them."""
    TOOLS_DIFFER = "tools_differ"
    """The agent offers other tools than in earlier turns, so the prompt, which describes them, differs."""
    DOES_NOT_APPEND = "template_does_not_append"
    """The chat template renders earlier turns to other tokens than were sampled."""
    FORKED = "forked"
    """Another turn already continues the same answer."""


class EpisodeOver(InvalidRequest):
    """The episode reached a limit, so no further answer is sampled; OpenAI's client does not retry this error."""

    code = "episode_over"


@dataclass(slots=True, eq=False)
class RecordedTurn:
    """A turn whose answer has been sampled and recorded.

    Attributes:
        parent: the turn that this turn continues.
        request_key: hash of the messages that the turn answers.
        agent_key: hash of the agent's own messages; differs from `request_key` if the gateway added results of tools.
        new_segment: the reason why the turn begins a new segment; None if it does not.
        read: True once a request continues the answer.
        abandoned: True if the agent repeated the request without reading the answer; the turn is not trained on.
        results: results of calls of the recipe's tools, which the agent does not see.
    """

    parent: RecordedTurn | None
    agent: str
    number: int
    request_key: bytes
    agent_key: bytes
    tools_key: bytes
    turn: Turn
    text: str
    finish_reason: str
    epoch: int
    new_segment: NewSegment | None
    reward: float = 0.0
    read: bool = False
    abandoned: bool = False
    results: Sequence[ChatMessage] = ()

    @property
    def path(self) -> list[RecordedTurn]:
        turns: list[RecordedTurn] = []
        at: RecordedTurn | None = self
        while at is not None:
            turns.append(at)
            at = at.parent
        return turns[::-1]

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """All tokens of the conversation up to the end of this turn, i32 [N]."""
        parts = [ids for each in self.path for ids in (each.turn.context_token_ids, each.turn.token_ids)]
        return np.concatenate(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTurn:
    """A turn that an engine is to sample."""

    agent: str
    number: int
    request: ChatCompletionRequest
    request_key: bytes
    agent_key: bytes
    tools_key: bytes
    hasher: Any
    parent: RecordedTurn | None
    known: NDArray[np.int32]
    """All tokens up to the end of `parent`; empty without a parent."""
    trains: bool


class Episode:
    """One episode, which yields one sample of the group that a `PromptOrder` requests; for use from one event loop."""

    def __init__(self, order: PromptOrder, sample: int, limits: EpisodeSection) -> None:
        self.order = order
        self.sample = sample
        self.limits = limits
        self.secret = secrets.token_hex(16)
        self.overridden: Counter[str] = Counter()
        """Number of times that the `PromptOrder` overrode a parameter of an agent, by the parameter's name."""
        self.calls = ToolCalls()
        self.sampling_s = 0.0
        """Seconds spent on sampling the turns."""
        self.over = ""
        """Reason why no further turn is sampled; empty while the episode continues."""
        self.was_refused = False
        """True once a request was refused because the episode is over."""
        self.last: RecordedTurn | None = None
        """The latest turn that trains."""
        self._turns: list[RecordedTurn] = []
        self._by_key: dict[bytes, RecordedTurn] = {}
        self._unread: dict[bytes, list[RecordedTurn]] = {}
        """By `agent_key`, the turns that are abandoned if their agent repeats its request without reading them."""
        self._numbers: Counter[str] = Counter()
        self._under_way: Counter[str] = Counter()

    @property
    def turns(self) -> Sequence[RecordedTurn]:
        """The turns to train on, in order of completion."""
        return [turn for turn in self._turns if not turn.abandoned]

    @property
    def abandoned(self) -> int:
        """Number of answers that were never read, because the agent repeated its request."""
        return sum(turn.abandoned for turn in self._turns)

    def last_of(self, agent: str) -> RecordedTurn | None:
        """Return the latest turn of `agent` to train on, or None."""
        return next((turn for turn in reversed(self._turns) if turn.agent == agent and not turn.abandoned), None)

    def rollout(self, verdict: Verdict, *, temperature: float) -> Rollout:
        """Return the turns to train on, of which there must be at least one, as one rollout."""
        turns = self.turns
        numbers = {id(turn): number for number, turn in enumerate(turns)}
        parents = tuple(ROOT if turn.parent is None else numbers[id(turn.parent)] for turn in turns)
        continued, answered = {ROOT}, set[bytes]()
        made = []
        for turn, parent in zip(turns, parents, strict=True):
            is_fork = turn.request_key in answered or (turn.new_segment is None and parent in continued)
            begins = NewSegment.FORKED if is_fork else turn.new_segment or ""
            continued.add(parent)
            answered.add(turn.request_key)
            made.append(replace(turn.turn, note=TurnNote(turn.reward, turn.agent, str(begins))))
        is_linear = parents == tuple(range(ROOT, len(turns) - 1))
        return Rollout(
            turns=tuple(made),
            parents=() if is_linear else parents,
            verdict=verdict,
            finish_reason=turns[-1].finish_reason,
            temperature=temperature,
            epoch=min(turn.epoch for turn in turns),
        )

    def plan(
        self, agent: str, body: Mapping[str, Any], *, trains: bool = True, within: PlannedTurn | None = None
    ) -> PlannedTurn:
        """Plan a turn: convert a request of `agent` to a request for the engine.

        After calls of the recipe's tools, the gateway repeats the request with the results of the calls. `within` is
        then the plan of the agent's original request.

        Raises `EpisodeOver` at a limit, and `InvalidRequest` for an invalid body or fields that agents may not set.
        """
        if not self.over and self._numbers.total() + self._under_way.total() >= self.limits.max_turns:
            self.over = f"it has had its {self.limits.max_turns} turns (episode.max_turns)"
        if self.over:
            self.was_refused = True
            raise EpisodeOver(f"this episode is over: {self.over}")
        return self._planned(agent, body, trains=trains, within=within)

    def measured(self, agent: str, body: Mapping[str, Any]) -> ChatCompletionRequest:
        """Return the shortest request of which the engine's answer tells the size of the prompt; it is no turn."""
        return self._planned(agent, body, trains=False, within=None).request.model_copy(update={"max_tokens": 1})

    def _planned(self, agent: str, body: Mapping[str, Any], *, trains: bool, within: PlannedTurn | None) -> PlannedTurn:
        from_agent = self._validated(body)
        is_trained = trains and self.order.purpose is Purpose.TRAINING
        if is_trained and from_agent.response_format is not None:
            raise InvalidRequest(
                "response_format: a grammar changes which tokens are sampled, and the trainer does not know it; leave "
                "it out while training, and check the answer's form in the reward",
                param="response_format",
            )
        tools_key = b""
        if from_agent.tools and from_agent.tool_choice != "none":
            described = json.dumps([tool.model_dump(mode="json") for tool in from_agent.tools], sort_keys=True)
            tools_key = hashlib.blake2b(described.encode(), digest_size=16).digest()
        hasher, known, first_new = hashlib.blake2b(agent.encode() + tools_key, digest_size=16), None, 0
        messages = list(from_agent.messages or ())
        for place, message in enumerate(messages):
            _hash_message(hasher, message)
            if message.role == "assistant" and (turn := self._by_key.get(hasher.digest())) is not None:
                known, first_new = turn, place + 1
                if message.reasoning_content is not None:
                    # Remove the thinking, which the gateway put into this field for the agent: the chat template may
                    # not support the field.
                    messages[place] = message.model_copy(update={"reasoning_content": None})
        if known is not None:
            messages[first_new:first_new] = known.results
        number = self._numbers[agent] + self._under_way[agent]
        tokens = _NO_TOKENS if known is None else known.token_ids
        continues = {}
        if known is not None and self.limits.history is History.EXACT:
            continues = {"continue_token_ids": tokens.tolist(), "continue_from": first_new}
        request = from_agent.model_copy(
            update={
                "messages": messages,
                **self._sampling(from_agent, agent, number),
                "policy_logprobs": trains and self.order.needs_policy_logprobs,
                **continues,
            }
        )
        return PlannedTurn(
            agent=agent,
            number=number,
            request=request,
            request_key=hasher.digest(),
            agent_key=hasher.digest() if within is None else within.agent_key,
            tools_key=tools_key,
            hasher=hasher,
            parent=known,
            known=tokens,
            trains=trains,
        )

    @contextmanager
    def sampling(self, planned: PlannedTurn) -> Iterator[None]:
        """Count a planned turn towards `max_turns` while it is sampled."""
        self._under_way[planned.agent] += 1
        try:
            yield
        finally:
            self._under_way[planned.agent] -= 1

    def record(self, planned: PlannedTurn, completion: ChatCompletion) -> RecordedTurn:
        """Record the completion of a planned turn. Raises `RecordError` if it lacks data that a rollout needs."""
        choice, prompt = completion.choices[0], np.asarray(completion.prompt_token_ids or (), np.int32)
        parent, tokens = planned.parent, planned.known
        known = len(tokens) if np.array_equal(prompt[: len(tokens)], tokens) else 0
        segment = None if known else (NewSegment.DOES_NOT_APPEND if parent is not None else self._reason(planned))
        turn = RecordedTurn(
            parent=parent if known else None,
            agent=planned.agent,
            number=planned.number,
            request_key=planned.request_key,
            agent_key=planned.agent_key,
            tools_key=planned.tools_key,
            turn=_turn(choice, prompt[known:]),
            text=choice.message.content,
            finish_reason=choice.finish_reason.value,
            epoch=completion.epoch,
            new_segment=segment,
        )
        self._numbers[planned.agent] += 1
        message = choice.message
        self.recognise(planned, message, turn)
        if planned.tools_key:
            self.calls.offered = True
            self.calls.parsed += len(message.tool_calls or ())
            self.calls.malformed += num_unparsed(message.content)
        if planned.trains:
            self._note_abandoned(turn, planned)
            self._turns.append(turn)
            self.last = turn
        limit = planned.request.token_limit
        if choice.finish_reason is FinishReason.LENGTH and limit == self._turn_tokens:
            self.over = f"an answer was cut at {limit} tokens (episode.turn_tokens, sampling.max_tokens)"
        return turn

    def recognise(self, planned: PlannedTurn, message: AssistantMessage, turn: RecordedTurn) -> None:
        """Let later requests continue `turn` if they repeat the messages of `planned`, followed by `message`."""
        hasher = planned.hasher.copy()
        _hash_message(hasher, ChatMessage(role="assistant", content=message.content, tool_calls=message.tool_calls))
        self._by_key[hasher.digest()] = turn

    @property
    def _turn_tokens(self) -> int:
        return self.limits.turn_tokens or self.order.sampling.max_tokens

    def _validated(self, body: Mapping[str, Any]) -> ChatCompletionRequest:
        if ours := sorted(body.keys() & _GATEWAY_FIELDS):
            raise InvalidRequest(f"{ours[0]}: the gateway sets it; leave it out", param=ours[0])
        if body.get("n") not in (None, 1):
            raise InvalidRequest("n: an agent reads one answer at a time; leave it out", param="n")
        if body.get("logprobs"):
            raise InvalidRequest("logprobs: must be false; the gateway records them itself", param="logprobs")
        self.overridden.update(name for name in body.keys() & _SAMPLING if body[name] is not None)
        left_out = _SAMPLING | {"model"}
        try:
            from_agent = ChatCompletionRequest.model_validate({k: v for k, v in body.items() if k not in left_out})
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False, include_context=False)[0]
            param = ".".join(str(part) for part in first["loc"]) or None
            reason = first["msg"].removeprefix("Value error, ")
            if first["type"] == "extra_forbidden":
                reason = "the engine does not know it, or not with this value, and would ignore it; leave it out"
            raise InvalidRequest(f"{param or 'body'}: {reason}", param=param) from None
        if not from_agent.messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        return from_agent

    def _sampling(self, from_agent: ChatCompletionRequest, agent: str, number: int) -> dict[str, Any]:
        order, sampling = self.order, self.order.sampling
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": min(self._turn_tokens, from_agent.token_limit or self._turn_tokens),
            "max_completion_tokens": None,
            "stop": [*sampling.stop, *from_agent.stop_strings] or None,
            "seed": rng.key(order.seed, "turn", self.sample, agent, number),
            "stream": False,
            "stream_options": None,
            "return_token_ids": True,
            "priority": Priority.TRAINING if order.purpose is Purpose.TRAINING else Priority.EVALUATION,
            "chat_template_kwargs": {**order.chat_template_kwargs, **from_agent.chat_template_kwargs},
        }

    def _reason(self, planned: PlannedTurn) -> NewSegment:
        own = [turn for turn in self._turns if turn.agent == planned.agent]
        if not own:
            return NewSegment.FIRST
        if again := next((turn.new_segment for turn in own if turn.request_key == planned.request_key), None):
            return again
        same_tools = any(turn.tools_key == planned.tools_key for turn in own)
        return NewSegment.HISTORY_DIFFERS if same_tools else NewSegment.TOOLS_DIFFER

    def _note_abandoned(self, turn: RecordedTurn, planned: PlannedTurn) -> None:
        """Mark earlier unread answers to the same request as abandoned, since the agent has repeated the request.

        An agent may also request several answers concurrently, and later continue some of them. The turn that `planned`
        continues is therefore no longer abandoned, nor are its ancestors.
        """
        continued = planned.parent if planned.agent_key == planned.request_key else None
        while continued is not None:
            continued.read, continued.abandoned = True, False
            continued = continued.parent
        path, waiting = turn.path, []
        for other in self._unread.get(turn.agent_key, ()):
            if other in path:
                waiting.append(other)
            elif not other.read:
                other.abandoned = True
        self._unread[turn.agent_key] = [*waiting, turn]


def _hash_message(hasher: Any, message: ChatMessage) -> None:
    """Add a message to the hash that identifies a conversation.

    An answer is hashed by the ids of its tool calls, or if it has none, by its text. Thinking and outer white space of
    the text are ignored.
    """
    parts = [message.role, message.content]
    if message.role == "assistant":
        calls = [call.id for call in message.tool_calls or ()]
        parts = [message.role, *(calls or [split(message.content)[1].strip()])]
    elif message.tool_call_id is not None:
        parts.append(message.tool_call_id)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "little") + data)


def _turn(choice: Choice, context: NDArray[np.int32]) -> Turn:
    if choice.token_ids is None or choice.token_logprobs is None or choice.version_spans is None or not len(context):
        raise RecordError(
            "the engine must answer with prompt_token_ids, token_ids, token_logprobs and version_spans when "
            "return_token_ids is set; run `pipelinerl conformance engine URL` against it"
        )
    tokens, logprobs, spanned = (
        len(choice.token_ids),
        len(choice.token_logprobs),
        sum(count for _, count in choice.version_spans),
    )
    if not 0 < tokens == logprobs == spanned:
        raise RecordError(
            f"expected as many token_logprobs as token_ids with version_spans over all of them; the engine answered "
            f"with {tokens} tokens, {logprobs} log-probs and spans over {spanned}"
        )
    return Turn(
        context_token_ids=context,
        token_ids=np.asarray(choice.token_ids, np.int32),
        behavior_logprobs=np.asarray(choice.token_logprobs, np.float32),
        spans=tuple(VersionSpan(version, count) for version, count in choice.version_spans),
    )
