"""Episodes without user code: the model calls built-in tools until it gives an answer without a call.

| waits for | unblocked by | or, at the latest |
|---|---|---|
| an answer | the gateway | the episode's deadline |
| a call | the tool, within its own limits | the episode's deadline |
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, final

from pipelinerl.environments.client import ChatRefused, ConversationOver, EpisodeClient
from pipelinerl.environments.environment import Task
from pipelinerl.environments.host_pool import EpisodeEnd
from pipelinerl.errors import PipelineError, UserError
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

    async def call(self, text: str) -> str:
        """Return the text that the model reads. Raises PipelineError or UserError for failures that are not the model's
        fault.
        """
        ...

    async def start(self) -> None:
        """Open the resources that calls need. Raises UserError if this machine lacks one of them."""
        ...

    async def close(self) -> None:
        """Release the resources that were opened."""
        ...


@final
class ToolLoop:
    """Player that offers tools to the model. It runs on the actor's event loop, since it runs no user code."""

    def __init__(self, *tools: Tool) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._offered = [_offered(tool) for tool in tools]
        self._session: aiohttp.ClientSession | None = None

    async def play(self, task: Task, *, base_url: str, api_key: str, timeout_s: float) -> EpisodeEnd:
        """Let the model call tools until it answers without a call. Raises TimeoutError."""
        if self._session is None:
            self._session = hot_session(token=None, keep_alive_s=_KEEP_ALIVE_S)
        client = EpisodeClient(self._session, base_url=base_url, api_key=api_key)
        messages: list[Any] = list(task.messages)
        try:
            async with asyncio.timeout(timeout_s):
                while (answer := await client.chat(messages, tools=self._offered)).tool_calls:
                    messages += [answer, *[await self._result(call) for call in answer.tool_calls]]
        except ConversationOver as error:
            return EpisodeEnd(how="over", reason=str(error))
        except (ChatRefused, PipelineError, UserError) as error:
            return EpisodeEnd(how="raised", reason=str(error))
        return EpisodeEnd(how="returned")

    async def start(self) -> None:
        """Open the tools. Raises UserError if this machine lacks what one of them needs."""
        for tool in self._tools.values():
            await tool.start()

    async def close(self) -> None:
        """Close the tools."""
        for tool in self._tools.values():
            await tool.close()
        if self._session is not None:
            await self._session.close()

    async def _result(self, call: Mapping[str, Any]) -> dict[str, str]:
        """Return the message that answers a call. If the model made an invalid call, the message holds the error."""
        name, tool = call["function"]["name"], self._tools.get(call["function"]["name"])
        if tool is None:
            content = f"error: there is no tool {name!r}; available: {', '.join(self._tools)}"
        elif (text := _argument(call["function"]["arguments"], tool.argument)) is None:
            content = f'error: the arguments must be {{"{tool.argument}": "…"}}, a text'
        else:
            content = await tool.call(text)
        return {"role": "tool", "tool_call_id": call["id"], "content": content}


def _offered(tool: Tool) -> dict[str, Any]:
    """Return the tool's description in OpenAI's form."""
    parameters = {"type": "object", "properties": {tool.argument: {"type": "string"}}, "required": [tool.argument]}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _argument(arguments: str, name: str) -> str | None:
    """Return the call's argument `name`, or None if there is no such argument or it is not a text."""
    try:
        fields = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if isinstance(value, str) else None
