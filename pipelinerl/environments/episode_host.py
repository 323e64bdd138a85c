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
import os
import socket
import sys
from typing import Any, Final

import msgspec

from pipelinerl.environments.client import ConversationOver, EpisodeClient
from pipelinerl.environments.environment import Task
from pipelinerl.environments.user_code import Play, load_play
from pipelinerl.errors import UserError
from pipelinerl.system.http_client import hot_session
from pipelinerl.system.references import last_line
from pipelinerl.types import Verdict

#: Maximum size in bytes of a line on the socket.
LONGEST_LINE: Final = 2**26
_KEEP_ALIVE_S: Final = 15.0


def main() -> None:
    """Import the user's code, report readiness, and play episodes until the socket closes."""
    connection = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    try:
        play = load_play(sys.argv[1], json.loads(sys.argv[2]))
    except UserError as error:
        connection.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
        return
    asyncio.run(_serve(connection, play))


async def _serve(connection: socket.socket, play: Play) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_LINE)
    running: dict[str, asyncio.Task[None]] = {}

    def tell(**fields: Any) -> None:
        writer.write(json.dumps(fields).encode() + b"\n")

    async with hot_session(token=None, keep_alive_s=_KEEP_ALIVE_S) as session:

        async def run(order: dict[str, Any]) -> None:
            client = EpisodeClient(session, base_url=order["base_url"], api_key=order["api_key"])
            tell(ended=order["begin"], **await _played(play, order["task"], client))

        tell(ready=True)
        while line := await reader.readline():
            order = json.loads(line)
            if "cancel" in order:
                if task := running.get(order["cancel"]):
                    task.cancel()
                continue
            task = running[order["begin"]] = asyncio.create_task(run(order))
            task.add_done_callback(lambda _, name=order["begin"]: running.pop(name))  # type: ignore[misc]
        for task in running.values():
            task.cancel()


async def _played(play: Play, task: Any, client: EpisodeClient) -> dict[str, Any]:
    try:
        value = await play(msgspec.convert(task, Task), client)
    except ConversationOver as error:
        return {"how": "over", "reason": str(error)}
    except asyncio.CancelledError:
        return {"how": "cancelled", "reason": "cancelled"}
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
