"""Episodes played on an OpenEnv server, over its WebSocket; OpenEnv's own package is not needed.

    {"type": "reset", "data": {"seed": 7}}       ─▶  {"type": "observation", "data": {"observation", "reward", "done"}}
    {"type": "step", "data": {"word": "crane"}}  ─▶  the same, or {"type": "error", "data": {"code", "message"}}
    {"type": "close"}

Only an answer that is no action, or an action that the server calls invalid, is the model's fault. An error or a
malformed message of the server ends the episode without a reward.

Each connection is a session that plays one episode. Each answer of the model is one action. `GET /schema` describes
actions: if an action has or requires exactly one field, the answer's text is that field's value. The actions of an MCP
server are tool calls. Any other action is a JSON object that the model writes.

| waits for | unblocked by | or, at the latest |
|---|---|---|
| a session | the server has one free | the episode's deadline; `_RESTART_S` if it cannot be reached |
| an observation | the server | the episode's deadline |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from pipelinerl import rng
from pipelinerl.errors import AddressError, ReferenceFailed, UserError
from pipelinerl.plugins.episodes.client import ChatAnswer, EpisodeClient
from pipelinerl.plugins.episodes.environment import Task
from pipelinerl.system.http_client import hot_session
from pipelinerl.system.outside import OutsideClient, OutsideUnreachable, ResponseRejected, proxy_of
from pipelinerl.system.references import last_line
from pipelinerl.system.returned_values import described, reward_of

if TYPE_CHECKING:
    import aiohttp

_KEEP_ALIVE_S: Final = 15.0
_SCHEMA_S: Final = 30.0
#: Maximum size of an observation in bytes, as in OpenEnv's own client.
_LARGEST: Final = 100 * 2**20
#: Seconds until the next attempt if the server has no free session, or cannot be reached.
_RETRY_S: Final = 0.25
#: Seconds for which a server may be unreachable, for example while it restarts.
_RESTART_S: Final = 60.0
#: Seeds sent to a server are below this bound, since numpy's older generators reject larger ones.
_SEEDS: Final = 2**31
_MCP_FIELDS: Final = frozenset({"tool_name", "arguments"})
_FULL: Final = "CAPACITY_REACHED"
_INVALID: Final = "VALIDATION_ERROR"


class OpenEnvOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The recipe's `environment_options`."""

    action: str | None = None
    """Name of the action's field that the answer's text fills; by default the only field, or the only required one."""
    observation: str | None = None
    """Name of the observation's field that the model sees; by default all fields that are not empty."""
    opening: str = "{observation}"
    """The first user message; it may contain the reset's `{observation}` and the task's `{prompt}`."""
    reset: dict[str, Any] = {}
    """Further arguments of the server's `reset`."""


class ServerRefused(UserError):
    """The server answered a message with an error."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class ServerMalformed(UserError):
    """The server sent something that OpenEnv's protocol does not allow."""


class InvalidAction(ValueError):
    """The model's answer is no action of this server, or the server calls the action invalid: the model's own fault."""


class Observed(msgspec.Struct, frozen=True):
    """The server's reaction to a reset or a step."""

    observation: Any
    reward: float | None = None
    done: bool = False


def open_environment(url: str, options: Mapping[str, Any]) -> Callable[[Task, EpisodeClient], Awaitable[Any]]:
    """Return the function that plays one episode on the server; raises like `OpenEnv`."""
    return OpenEnv(url, options).play


class OpenEnv:
    """Plays episodes on one server. Raises `ReferenceFailed` if the URL or an option is invalid."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url = url.rstrip("/").replace("ws", "http", 1) if url.startswith("ws") else url.rstrip("/")
        parts = urlsplit(self._url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ReferenceFailed(f"expected openenv:http://host:port, the base URL of an OpenEnv server, got {url!r}")
        try:
            self._options = msgspec.convert(dict(options), OpenEnvOptions)
        except msgspec.ValidationError as error:
            raise ReferenceFailed(f"environment_options: {error}") from None
        self._actions: Actions | None = None

    async def play(self, task: Task, client: EpisodeClient) -> float:
        """Play one episode; the reward of each step becomes the turn's reward.

        Raises:
            AddressError: the server cannot be reached, is no OpenEnv server, or closes the connection.
            ServerRefused: the environment failed.
            ServerMalformed: the server sent something that the protocol does not allow.
        """
        async with hot_session(token=None, keep_alive_s=_KEEP_ALIVE_S) as http:
            if self._actions is None:
                self._actions = await self._described()
            actions = self._actions
            data = {"seed": rng.key(0, "openenv", task.problem_id) % _SEEDS, **self._options.reset, **task.metadata}
            session, observed = await self._begun(http, data)
            offered = {"tools": await session.tools()} if actions.are_calls else {}
            *before, last = task.messages
            text = self._options.opening.replace("{prompt}", last["content"])
            text = text.replace("{observation}", self._text(observed.observation))
            messages: list[Any] = [*before, _user("\n\n".join(part for part in (text, actions.explained) if part))]
            while not observed.done:
                answer = await client.chat(messages, **offered)
                replies, observed = await self._reply(session, answer, actions, observed)
                if observed.reward:
                    await client.reward(observed.reward)
                if not replies:
                    break
                messages += [answer, *replies]
            await session.close()
        return 0.0

    async def _reply(
        self, session: OpenEnvSession, answer: ChatAnswer, actions: Actions, last: Observed
    ) -> tuple[list[dict[str, Any]], Observed]:
        """Send an answer's actions; return messages for the model (none if there is no action) and the observation."""
        nothing = Observed(last.observation, None, last.done)
        if actions.are_calls:
            return await self._called(session, answer, nothing)
        try:
            observed = await session.step(actions.of(answer.content))
        except InvalidAction as error:
            return [_user(f"error: {error}")], nothing
        return [_user(self._text(observed.observation))], observed

    async def _called(
        self, session: OpenEnvSession, answer: ChatAnswer, nothing: Observed
    ) -> tuple[list[dict[str, Any]], Observed]:
        replies, rewards, observed = [], 0.0, nothing
        for call in answer.tool_calls:
            function = call["function"]
            try:
                arguments = _json_of(function["arguments"] or "{}", "arguments")
                observed = await session.step(
                    {"type": "call_tool", "tool_name": function["name"], "arguments": arguments}
                )
                content = _result_of(observed.observation) or self._text(observed.observation)
                rewards += observed.reward or 0.0
            except InvalidAction as error:
                content = f"error: {error}"
            replies.append({"role": "tool", "tool_call_id": call["id"], "content": content})
            if observed.done:
                break
        return replies, Observed(observed.observation, rewards or None, observed.done)

    def _text(self, observation: Any) -> str:
        if not isinstance(observation, Mapping):
            return _plain(observation)
        if (field := self._options.observation) is not None:
            if field not in observation:
                names = ", ".join(sorted(observation))
                raise UserError(
                    f"environment_options.observation: the server's observation has no {field!r}; it has {names}"
                )
            return _plain(observation[field])
        shown = {name: value for name, value in observation.items() if value not in (None, "", [], {})}
        return _plain(next(iter(shown.values()))) if len(shown) == 1 else _plain(shown)

    async def _described(self) -> Actions:
        client = OutsideClient()
        try:
            response = await client.get(f"{self._url}/schema", timeout_s=_SCHEMA_S)
            if response.status != 200:
                raise self._no_server(f"GET /schema answered {response.status}")
            return Actions(response.json()["action"], self._options.action)
        except (OutsideUnreachable, TimeoutError) as error:
            raise self._unreachable(error) from None
        except ResponseRejected as error:
            raise self._no_server(str(error)) from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise self._no_server("GET /schema did not describe actions") from None
        finally:
            await client.close()

    async def _begun(self, http: aiohttp.ClientSession, data: Mapping[str, Any]) -> tuple[OpenEnvSession, Observed]:
        """Open a session and reset it; retry while all sessions are taken, or for `_RESTART_S` if unreachable."""
        import aiohttp

        until = time.monotonic() + _RESTART_S
        while True:
            try:
                try:
                    socket = await http.ws_connect(f"{self._url}/ws", max_msg_size=_LARGEST, proxy=proxy_of(self._url))
                except aiohttp.WSServerHandshakeError as error:
                    raise self._no_server(f"a WebSocket at /ws was answered by {error.status}") from None
                except (aiohttp.ClientError, TimeoutError) as error:
                    raise self._unreachable(error) from None
                session = OpenEnvSession(socket, self._url)
                return session, await session.exchange("reset", data)
            except AddressError:
                if time.monotonic() > until:
                    raise
            except ServerRefused as error:
                if error.code != _FULL:
                    raise
            await asyncio.sleep(_RETRY_S)

    def _unreachable(self, error: Exception) -> AddressError:
        # The system's message is preferred, since aiohttp's repeats the address.
        system = getattr(error, "os_error", None)
        reason = os.strerror(system.errno) if system and system.errno else str(error) or type(error).__name__
        return AddressError(f"the OpenEnv server at {self._url} cannot be reached: {reason}; start it, or fix the URL")

    def _no_server(self, reason: str) -> AddressError:
        return AddressError(
            f"{self._url} is no OpenEnv server: {reason}; give its base URL, without a path such as /ws"
        )


class OpenEnvSession:
    """One connection to an OpenEnv server."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, url: str) -> None:
        self._socket = socket
        self._url = url

    async def step(self, action: Mapping[str, Any]) -> Observed:
        """Send an action and return the observation.

        Raises `InvalidAction` for an action that the server calls invalid, and the other errors of `exchange`.
        """
        try:
            return await self.exchange("step", action)
        except ServerRefused as error:
            if error.code == _INVALID:
                raise InvalidAction(str(error)) from None
            raise

    async def tools(self) -> list[dict[str, Any]]:
        """Return the tools of an MCP server in OpenAI's form."""
        observed = await self.exchange("step", {"type": "list_tools"})
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description") or "",
                    "parameters": tool.get("input_schema") or tool.get("inputSchema") or {"type": "object"},
                },
            }
            for tool in observed.observation.get("tools", ())
        ]

    async def exchange(self, kind: str, data: Mapping[str, Any]) -> Observed:
        """Send a message and return the observation.

        Raises `ServerRefused`, `ServerMalformed`, or `AddressError` if disconnected.
        """
        import aiohttp

        try:
            await self._socket.send_json({"type": kind, "data": dict(data)})
            message = await self._socket.receive()
        except ConnectionError:
            message = None
        if message is None or message.type is not aiohttp.WSMsgType.TEXT:
            raise AddressError(
                f"the OpenEnv server at {self._url} closed its connection in the middle of an episode; its log says why"
            )
        try:
            answer = json.loads(message.data)
            if answer["type"] == "error":
                error = answer["data"]
                fields = [
                    f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg')}"
                    for each in error.get("errors") or ()
                ]
                reason = f"the OpenEnv server refused a {kind}: {'; '.join(fields) or error.get('message')}"
                raise ServerRefused(reason, str(error.get("code", "")))
            observed = msgspec.convert(answer["data"], Observed)
            return observed if observed.reward is None else replace(observed, reward=reward_of(observed.reward))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as malformed:
            raise ServerMalformed(
                f"the OpenEnv server at {self._url} answered a {kind} with {described(message.data)}, which is no "
                f"observation ({last_line(malformed)}); see its log, and the version of its package"
            ) from None

    async def close(self) -> None:
        """End the session; the episode is complete, so a lost connection does not matter."""
        with contextlib.suppress(ConnectionError):
            await self._socket.send_json({"type": "close"})


class Actions:
    """The fields of a server's actions, read from their JSON schema.

    `chosen` is the field that the answer's text fills; None chooses the only field, or the only required one, if any.
    Raises `ReferenceFailed` if the actions have no field `chosen`.
    """

    def __init__(self, schema: Mapping[str, Any], chosen: str | None) -> None:
        fields = {name: value for name, value in schema.get("properties", {}).items() if name != "metadata"}
        required = [name for name in schema.get("required", ()) if name in fields]
        if chosen is not None and chosen not in fields:
            names = ", ".join(fields) or "none"
            raise ReferenceFailed(
                f"environment_options.action: the server's actions have no {chosen!r}; fields: {names}"
            )
        single = next((names[0] for names in (list(fields), required) if len(names) == 1), None)
        self.are_calls = chosen is None and fields.keys() >= _MCP_FIELDS
        self._field = chosen or single
        field = {} if self._field is None else fields[self._field]
        self._is_text = any(kind.get("type", "string") == "string" for kind in field.get("anyOf") or [field])
        self._fields = fields

    @property
    def explained(self) -> str:
        """Instruction to the model on the form of its answers; empty if they are plain text or tool calls."""
        if self.are_calls or self._field is not None:
            return ""
        return f"Answer with one JSON object with these fields: {json.dumps(self._fields, separators=(',', ':'))}"

    def of(self, text: str) -> dict[str, Any]:
        """Parse the model's answer `text` into an action. Raises `InvalidAction` with a message for the model."""
        if self._field is not None:
            return {self._field: text if self._is_text else _json_of(text, f"a value of {self._field}")}
        action = _json_of(text[text.find("{") : text.rfind("}") + 1], "one JSON object")
        if not isinstance(action, dict):
            raise InvalidAction("the answer must be one JSON object")
        return action


def _json_of(text: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidAction(f"the answer must be {expected} in JSON") from None


def _result_of(observation: Any) -> str:
    """Return the text of a tool's result or error in MCP's form; "" if the observation has neither."""
    if not isinstance(observation, Mapping):
        return ""
    if isinstance(error := observation.get("error"), Mapping):
        return f"error: {error.get('message')}"
    result = observation.get("result")
    parts = result.get("content") if isinstance(result, Mapping) else None
    return "\n".join(str(part["text"]) for part in parts or () if isinstance(part, Mapping) and "text" in part)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
