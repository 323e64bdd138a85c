"""`EpisodeClient`: what user code asks the model through, in an episode host. Shaped like `openai.AsyncOpenAI`.

answer = await client.chat(messages)                         an `ChatAnswer`, which may stand among the next messages
completion = await client.chat.completions.create(messages=messages)    OpenAI's object, as attributes
client.base_url, client.api_key                              for any other program that speaks OpenAI's API
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, final

from pipelinerl.environments.environment import UNTRAINED, ChatInput
from pipelinerl.system.http_client import call_timeout

if TYPE_CHECKING:
    import aiohttp

#: An answer of an engine may take this long; the episode's own deadline ends it before.
_LONGEST_TURN_S: Final = 86_400.0
_OVER: Final = frozenset({"episode_over", "context_length_exceeded", "episode_not_found"})


class ChatRefused(Exception):
    """The gateway has refused a request; the message says why."""


class ConversationOver(ChatRefused):
    """No further answer is sampled: a limit of the episode is reached. What was answered is judged as it is."""


@final
@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """An answer of the model. `message` is what the next request repeats of it."""

    message: Mapping[str, Any]
    finish_reason: str

    @property
    def content(self) -> str:
        """Its text."""
        return str(self.message.get("content") or "")

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        """The calls in it, as OpenAI has them: `id`, `function.name`, and `function.arguments` as the text of JSON."""
        return tuple(self.message.get("tool_calls") or ())

    @property
    def truncated(self) -> bool:
        """Whether it was cut at its limit of tokens."""
        return self.finish_reason == "length"


@final
class EpisodeClient:
    """One agent's access to the model in one episode."""

    def __init__(self, session: aiohttp.ClientSession, *, base_url: str, api_key: str) -> None:
        """`base_url` ends with the agent's name and `/v1`."""
        self._session = session
        self.base_url = base_url
        self.api_key = api_key
        self.chat = ChatCalls(self)

    def agent(self, name: str, *, trains: bool = True) -> EpisodeClient:
        """Return the client of another agent of the same episode, which has conversations of its own.

        The turns of an agent with `trains=False` are not trained on, and are no part of the rollout.

        Raises:
            ValueError: the name is no identifier.
        """
        if not name.isidentifier():
            raise ValueError(f"client.agent: the name must be an identifier, got {name!r}")
        episode = self.base_url.rsplit("/", 2)[0]
        prefix = "" if trains else UNTRAINED
        return EpisodeClient(self._session, base_url=f"{episode}/{prefix}{name}/v1", api_key=self.api_key)

    async def reward(self, value: float) -> None:
        """Add to the reward of this agent's latest turn."""
        await self.post("/reward", {"reward": float(value)})

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Ask the gateway.

        Raises:
            ConversationOver: a limit of the episode is reached.
            ChatRefused: it refuses for another reason.
        """
        base = self.base_url if path.startswith("/chat") else self.base_url.removesuffix("/v1")
        async with self._session.post(
            base + path, json=body, timeout=call_timeout(_LONGEST_TURN_S), headers={"accept": "application/json"}
        ) as response:
            answer = await response.json(content_type=None)
            if response.status == 200:
                return answer
            error = answer.get("error") or {}
            kind = ConversationOver if error.get("code") in _OVER else ChatRefused
            raise kind(str(error.get("message")))


@final
class ChatCalls:
    """`client.chat`: callable, and with OpenAI's `completions.create`."""

    def __init__(self, client: EpisodeClient) -> None:
        self._client = client
        self.completions = Completions(client)

    async def __call__(self, messages: Sequence[ChatInput | ChatAnswer], **options: Any) -> ChatAnswer:
        """The model's answer to `messages`. `options` are OpenAI's, such as `tools` or `max_tokens`."""
        completion = await self._client.post("/chat/completions", _body(messages, options))
        choice = completion["choices"][0]
        return ChatAnswer(choice["message"], choice["finish_reason"])


@final
class Completions:
    """`client.chat.completions`, as OpenAI's client has it."""

    def __init__(self, client: EpisodeClient) -> None:
        self._client = client

    async def create(self, *, messages: Sequence[ChatInput | ChatAnswer], **options: Any) -> Any:
        """A completion, whose fields are attributes."""
        return _as_attributes(await self._client.post("/chat/completions", _body(messages, options)))


def _body(messages: Sequence[ChatInput | ChatAnswer], options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "messages": [dict(each.message) if isinstance(each, ChatAnswer) else dict(each) for each in messages],
        **options,
        "stream": False,
    }


def _as_attributes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return SimpleNamespace(**{name: _as_attributes(each) for name, each in value.items()})
    return [_as_attributes(each) for each in value] if isinstance(value, list) else value
