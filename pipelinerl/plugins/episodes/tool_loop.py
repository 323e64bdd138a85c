"""The recipe's tools (`episode.tools`), which the gateway offers to the model and runs for each agent that trains.

The gateway runs calls of these tools and samples again, until an answer calls none of them, or also calls a tool of the
agent. The agent sees only that answer. A domain without user code has `OneRequest` as its agent.

| waits for | unblocked by | or, at the latest |
|---|---|---|
| an answer | the gateway | the episode's deadline |
| a call | the tool, within its own limits | the episode's deadline |
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from inference_contract.errors import InvalidRequest
from inference_contract.schemas import ChatMessage
from inference_contract.tools import ToolCall
from pipelinerl.plugins.episodes.client import ChatRefused, ConversationOver, EpisodeClient
from pipelinerl.plugins.episodes.environment import Task
from pipelinerl.plugins.episodes.host_pool import EpisodeEnd
from pipelinerl.system.http_client import hot_session

if TYPE_CHECKING:
    import aiohttp

_KEEP_ALIVE_S: Final = 15.0


class Tool(Protocol):
    """A function that the model may call with a single text argument."""

    name: str
    description: str
    argument: str
    """Name of the single argument."""

    async def call(self, text: str) -> tuple[str, bool]:
        """Return the text for the model, and True if the call failed by the model's fault.

        Raises `PipelineError` if it failed for any other reason.
        """
        ...

    async def start(self) -> None:
        """Open the resources that calls need. Raises `UserError` if this machine lacks one of them."""
        ...

    async def close(self) -> None:
        """Release the resources."""
        ...


class Toolbox:
    """The tools of a domain."""

    def __init__(self, *tools: Tool) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._offered = [_offered(tool) for tool in tools]

    def offered_with(self, own: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the recipe's tools and the agent's tools `own`. Raises `InvalidRequest` if two have the same name."""
        for name in names_of(own) & self._tools.keys():
            raise InvalidRequest(
                f"tools: {name!r} is a tool of the recipe (episode.tools); rename yours", param="tools"
            )
        return [*self._offered, *own]

    async def result(self, call: ToolCall, known: str) -> tuple[ChatMessage, bool]:
        """Run a call; return its result as a message, and True if it failed by the model's fault.

        `known` lists the agent's tools, for an error message. Raises `PipelineError` if it failed for any other
        reason.
        """
        name, tool = call.function.name, self._tools.get(call.function.name)
        if tool is None:
            names = ", ".join([*self._tools, known] if known else self._tools)
            content, has_failed = f"error: there is no tool {name!r}; available: {names}", True
        else:
            try:
                fields = json.loads(call.function.arguments)
            except (ValueError, RecursionError):
                fields = None
            text = fields.get(tool.argument) if isinstance(fields, dict) else None
            if isinstance(text, str):
                content, has_failed = await tool.call(text)
            else:
                content, has_failed = f'error: the arguments must be {{"{tool.argument}": "…"}}, a text', True
        return ChatMessage(role="tool", tool_call_id=call.id, content=content), has_failed

    async def start(self) -> None:
        """Open the tools. Raises `UserError` if this machine lacks a resource that one of them needs."""
        for tool in self._tools.values():
            await tool.start()

    async def close(self) -> None:
        for tool in self._tools.values():
            await tool.close()


class OneRequest:
    """Player for domains without user code, which sends one request to the model; it runs on the actor's event loop."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def play(self, task: Task, *, base_url: str, api_key: str, timeout_s: float) -> EpisodeEnd:
        if self._session is None:
            self._session = hot_session(token=None, keep_alive_s=_KEEP_ALIVE_S)
        client = EpisodeClient(self._session, base_url=base_url, api_key=api_key)
        try:
            async with asyncio.timeout(timeout_s):
                await client.chat(task.messages)
        except ConversationOver as error:
            return EpisodeEnd(how="over", reason=str(error))
        except ChatRefused as error:
            return EpisodeEnd(how="raised", reason=str(error))
        return EpisodeEnd(how="returned")

    async def start(self) -> None:
        """Do nothing: the first episode opens the connections."""

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def names_of(tools: Sequence[Any]) -> set[str]:
    """Return the names of tools in OpenAI's form. Skip invalid tools, which validation rejects later."""
    functions = [tool.get("function") for tool in tools if isinstance(tool, Mapping)]
    return {str(each.get("name")) for each in functions if isinstance(each, Mapping)}


def _offered(tool: Tool) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {tool.argument: {"type": "string"}}, "required": [tool.argument]}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}
