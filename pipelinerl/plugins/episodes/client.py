"""Client through which user code calls the model, with an interface like that of `openai.AsyncOpenAI`.

answer = await client.chat(messages)    a `ChatAnswer`, which may be a message of the next request
completion = await client.chat.completions.create(messages=messages)    OpenAI's object, as attributes
client.base_url, client.api_key         for any other program that speaks OpenAI's API
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from pipelinerl.plugins.episodes.environment import UNTRAINED, ChatInput
from pipelinerl.system.http_client import call_timeout
from pipelinerl.system.returned_values import reward_of

if TYPE_CHECKING:
    import aiohttp

#: Timeout in seconds for one answer; it is never reached, since the episode's deadline is earlier.
_LONGEST_TURN_S: Final = 86_400.0
_OVER: Final = frozenset({"episode_over", "context_length_exceeded", "episode_not_found"})


class ChatRefused(Exception):
    """The gateway rejected a request; the message gives the reason."""


class ConversationOver(ChatRefused):
    """The episode reached a limit, so no further answer is sampled; earlier answers are judged as usual."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One answer of the model; to continue the conversation, send its `message` in the next request."""

    message: Mapping[str, Any]
    finish_reason: str

    @property
    def content(self) -> str:
        return str(self.message.get("content") or "")

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        """The tool calls in OpenAI's form: `id`, `function.name`, and `function.arguments` as JSON text."""
        return tuple(self.message.get("tool_calls") or ())

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


class EpisodeClient:
    """One agent's access to the model in one episode."""

    def __init__(self, session: aiohttp.ClientSession, *, base_url: str, api_key: str) -> None:
        """Create a client; `base_url` must end with `/<agent's name>/v1`."""
        self._session = session
        self.base_url = base_url
        self.api_key = api_key
        self.chat = ChatCalls(self)

    def agent(self, name: str, *, trains: bool = True) -> EpisodeClient:
        """Return the client of another agent of the same episode. Raises `ValueError` if `name` is no identifier.

        Turns of an agent with `trains=False` are not part of the rollout.
        """
        if not name.isidentifier():
            raise ValueError(f"client.agent: the name must be an identifier, got {name!r}")
        episode = self.base_url.rsplit("/", 2)[0]
        prefix = "" if trains else UNTRAINED
        return EpisodeClient(self._session, base_url=f"{episode}/{prefix}{name}/v1", api_key=self.api_key)

    async def reward(self, value: float) -> None:
        """Add `value` to the reward of this agent's latest turn. Raises `NotAReward` if it is no number within ±1e6."""
        await self.post("/reward", {"reward": reward_of(value)})

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a request to the gateway and return the JSON of its response.

        Raises `ConversationOver` if a limit of the episode is reached, and `ChatRefused` for any other rejection.
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


class ChatCalls:
    """The object `client.chat`: it can be called, and also has OpenAI's method `completions.create`."""

    def __init__(self, client: EpisodeClient) -> None:
        self._client = client
        self.completions = Completions(client)

    async def __call__(self, messages: Sequence[ChatInput | ChatAnswer], **options: Any) -> ChatAnswer:
        """Return the model's answer to `messages`. `options` are OpenAI's, such as `tools` or `max_tokens`."""
        completion = await self._client.post("/chat/completions", _body(messages, options))
        choice = completion["choices"][0]
        return ChatAnswer(choice["message"], choice["finish_reason"])


class Completions:
    """The object `client.chat.completions`, with the method `create` of OpenAI's client."""

    def __init__(self, client: EpisodeClient) -> None:
        self._client = client

    async def create(self, *, messages: Sequence[ChatInput | ChatAnswer], **options: Any) -> Any:
        """Return the model's answer as OpenAI's completion object, whose fields are attributes."""
        return _as_attributes(await self._client.post("/chat/completions", _body(messages, options)))


def _body(messages: Sequence[ChatInput | ChatAnswer], options: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(messages, str | Mapping) or any(isinstance(each, str) for each in messages):
        raise TypeError('messages must be a list of messages, such as [{"role": "user", "content": "hello"}]')
    return {
        "messages": [dict(each.message) if isinstance(each, ChatAnswer) else dict(each) for each in messages],
        **options,
        "stream": False,
    }


def _as_attributes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return SimpleNamespace(**{name: _as_attributes(each) for name, each in value.items()})
    return [_as_attributes(each) for each in value] if isinstance(value, list) else value
