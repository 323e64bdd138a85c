"""An episode host: a child process that runs an environment.

    python -m pipelinerl.plugins.episodes.episode_host REFERENCE

A single event loop plays many episodes. Standard input is a socket. The host reads the environment's options from it,
as a JSON line. For each episode it then reads a JSON line, and writes one when the episode ends:

    {"begin": id, "task": …, "base_url": …, "api_key": …}    {"cancel": id}
    {"ended": id, "how": "returned" | "over" | "raised" | "cancelled", "value" | "reason": …}

Output of user code goes to the actor's output. The host exits with its actor, and when the socket closes.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pipelinerl.errors import UserError
from pipelinerl.plugins.episodes.client import ConversationOver, EpisodeClient
from pipelinerl.plugins.episodes.environment import Task
from pipelinerl.plugins.episodes.user_code import Play, load_play, place_of_play
from pipelinerl.plugins.episodes.verifiers_host import run_to_its_end, serve, take_connection
from pipelinerl.system.background import raise_if_cancelled
from pipelinerl.system.http_client import hot_session
from pipelinerl.system.references import last_line
from pipelinerl.system.returned_values import EXPECTED, NotAReward, NotAVerdict, plain_verdict, reward_of
from pipelinerl.types import Verdict

if TYPE_CHECKING:
    import socket

    import aiohttp

_KEEP_ALIVE_S: Final = 15.0


def main() -> None:
    """Import the user's code, report readiness, and play episodes until the socket closes."""
    connection, options = take_connection()
    try:
        play = load_play(sys.argv[1], options)
        place = place_of_play(sys.argv[1])
    except UserError as error:
        connection.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
        return
    run_to_its_end(_serve(connection, play, place))


async def _serve(connection: socket.socket, play: Play, place: str) -> None:
    async with hot_session(token=None, keep_alive_s=_KEEP_ALIVE_S) as session:
        await serve(connection, partial(_played, play, place, session))


async def _played(play: Play, place: str, session: aiohttp.ClientSession, order: dict[str, Any]) -> dict[str, Any]:
    """Play an episode; return the fields of its end: a result that is not a reward is described under `other`."""
    client = EpisodeClient(session, base_url=order["base_url"], api_key=order["api_key"])
    try:
        value = await play(msgspec.convert(order["task"], Task), client)
    except ConversationOver as error:
        return {"how": "over", "reason": str(error)}
    except UserError as error:
        return {"how": "raised", "reason": str(error)}
    except BaseException as error:  # user code may raise anything
        raise_if_cancelled(error)
        return {"how": "raised", "reason": last_line(error, place)}
    ended: dict[str, Any] = {"how": "returned"}
    try:
        if isinstance(value, Verdict):
            ended["verdict"] = msgspec.to_builtins(plain_verdict(value))
        elif value is not None:
            ended["value"] = reward_of(value)
    except NotAVerdict as error:
        ended["other"] = f"{place}: {error}"
    except NotAReward as error:
        ended["other"] = f"{place} must return {EXPECTED}, it returned {error}"
    return ended


if __name__ == "__main__":
    main()
