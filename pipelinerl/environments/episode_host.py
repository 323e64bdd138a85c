"""An episode host: a child process that runs an environment.

    python -m pipelinerl.environments.episode_host REFERENCE OPTIONS

A single event loop plays many episodes. Standard input is a socket. For each episode the host reads a JSON line from
it, and writes one when the episode ends:

    {"begin": id, "task": …, "base_url": …, "api_key": …}    {"cancel": id}
    {"ended": id, "how": "returned" | "over" | "raised" | "cancelled", "value" | "reason": …}

Output of user code goes to the actor's output. The host exits with its actor, and when the socket closes.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pipelinerl.environments.client import ConversationOver, EpisodeClient
from pipelinerl.environments.environment import Task
from pipelinerl.environments.user_code import Play, load_play
from pipelinerl.environments.verifiers_host import serve, take_connection
from pipelinerl.errors import UserError
from pipelinerl.system.http_client import hot_session
from pipelinerl.system.references import last_line
from pipelinerl.types import Verdict

if TYPE_CHECKING:
    import socket

    import aiohttp

_KEEP_ALIVE_S: Final = 15.0


def main() -> None:
    """Import the user's code, report readiness, and play episodes until the socket closes."""
    connection = take_connection()
    try:
        play = load_play(sys.argv[1], json.loads(sys.argv[2]))
    except UserError as error:
        connection.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
        return
    asyncio.run(_serve(connection, play))


async def _serve(connection: socket.socket, play: Play) -> None:
    async with hot_session(token=None, keep_alive_s=_KEEP_ALIVE_S) as session:
        await serve(connection, partial(_played, play, session))


async def _played(play: Play, session: aiohttp.ClientSession, order: dict[str, Any]) -> dict[str, Any]:
    client = EpisodeClient(session, base_url=order["base_url"], api_key=order["api_key"])
    try:
        value = await play(msgspec.convert(order["task"], Task), client)
    except ConversationOver as error:
        return {"how": "over", "reason": str(error)}
    except UserError as error:
        return {"how": "raised", "reason": str(error)}
    except (Exception, SystemExit) as error:  # user code may raise anything
        return {"how": "raised", "reason": last_line(error)}
    return {"how": "returned", **_plain(value)}


def _plain(value: Any) -> dict[str, Any]:
    """Convert the result of user code to JSON types; a result that is not a reward is described under `other`."""
    if isinstance(value, Verdict):
        return {"verdict": msgspec.to_builtins(value)}
    item = getattr(value, "item", None)
    plain = item() if callable(item) else value
    if plain is None or isinstance(plain, bool | int):
        return {"value": plain}
    if isinstance(plain, float):
        return {"value": plain} if math.isfinite(plain) else {"other": repr(plain)}
    return {"other": f"{type(value).__name__} {repr(value)[:80]}"}


if __name__ == "__main__":
    main()
