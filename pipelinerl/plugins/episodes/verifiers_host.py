"""An episode host for a taskset of the library verifiers: `PYTHON verifiers_host.py TASKSET`.

The script runs in a Python environment that has verifiers and not pipelinerl, so it imports nothing of ours. It speaks
the protocol of `episode_host.py`, which uses `serve` too. A task's number in the taskset is `metadata["index"]`. The
taskset's rubric scores an episode: its reward is the sum of the rewards of the traces whose agents train.

If an environment has several agents, each calls the gateway under the name of its role. An agent does not train if
the options say so (`judge = { trains = false }`) or the environment marks it as not trainable.

By default the agent is a conversation in this process (`ChatHarness`). verifiers' own harnesses start a program for
each episode; the options name one as `agent = { harness = { id = "null" } }`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import json
import os
import re
import socket
import ssl
import sys
import traceback
import types
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

#: Maximum size in bytes of a line on the socket.
LONGEST_LINE = 2**26
#: Maximum length in characters of a reason that is sent to the actor.
LONGEST_REASON = 1000
#: Timeout in seconds for one request; it is never reached, since the episode's deadline is earlier.
_LONGEST_TURN_S = 86_400.0
#: The name under which verifiers finds the harness of this file.
_HARNESS = "pipelinerl_chat"
#: Prefix of the names of agents that do not train, and name of a single agent, as in the gateway.
_UNTRAINED, _MAIN = "untrained-", "main"


def main() -> None:
    """Load the taskset, report readiness, and play episodes until the socket closes."""
    connection, options = take_connection()
    # A judge of verifiers opens a client for each call, and would spend most of the time on reading certificates.
    ssl.create_default_context = functools.cache(ssl.create_default_context)  # type: ignore[assignment]
    try:
        environment = _environment(sys.argv[1], options)
        tasks = environment.taskset
        if not tasks.INFINITE:
            tasks = list(tasks)
    except Exception as error:  # the library and the taskset may raise anything
        reason = f"verifiers:{sys.argv[1]} cannot be loaded by {sys.executable}: {_described(error)}"
        connection.sendall(json.dumps({"error": reason}).encode() + b"\n")
        return
    run_to_its_end(_serve(connection, environment, tasks))


def _environment(taskset: str, options: dict[str, Any]) -> Any:
    """Load the verifiers environment of a taskset. Agents get `ChatHarness` unless the taskset sets a harness."""
    sys.path.insert(0, options.pop("path", os.getcwd()))
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config

    _offer_chat_harness()
    _share_connections()
    options["taskset"] = {**options.get("taskset", {}), "id": taskset}
    is_free = vf.default_agent_harness(taskset).id == vf.HarnessConfig().id
    trains = {}
    for role, field in env_config_type(taskset, options.get("id", "")).model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            harness = {"harness": {"id": _HARNESS}} if is_free and field.default.harness is None else {}
            options[role] = {"runtime": {"type": "subprocess"}, **harness, **options.get(role, {})}
            trains[role] = options[role].pop("trains", True)
    environment = load_environment(resolve_env_config(options))
    _name_agents(environment, trains)
    return environment


def _share_connections() -> None:
    """Let the agents of all episodes share connections to the gateway.

    verifiers keeps a client for each base URL until the host ends, and each agent of an episode has its own URL.
    """
    from verifiers.v1.clients import eval as relay

    build, clients = relay.build_async_httpx, dict[str, Any]()

    def shared(config: Any) -> Any:
        key = config.timeout.model_dump_json()
        if key not in clients:
            clients[key] = build(config)
        return clients[key]

    relay.build_async_httpx = shared


def _name_agents(environment: Any, trains: dict[str, bool]) -> None:
    """Let each agent call the gateway under its own name; `trains` says for each agent's role whether it may train.

    verifiers calls `setup` with the agents of each episode before they run. An agent whose options name another model
    server keeps it, and does not train.
    """
    setup = environment.setup

    async def named(agents: Any) -> None:
        await setup(agents)
        for role, may_train in trains.items():
            agent, is_ours = getattr(agents, role), getattr(environment.config, role).client is None
            agent.trainable = agent.trainable and may_train and is_ours
            if is_ours:
                name = ("" if agent.trainable else _UNTRAINED) + (role if len(trains) > 1 else _MAIN)
                url = agent.ctx.client.base_url.replace(f"/{_MAIN}/v1", f"/{name}/v1")
                client = agent.ctx.client.model_copy(update={"base_url": url})
                agent.ctx = dataclasses.replace(agent.ctx, client=client)

    environment.setup = named


async def _serve(connection: socket.socket, environment: Any, tasks: Any) -> None:
    async with environment.serving():
        await serve(connection, functools.partial(_played, environment, tasks))


def take_connection() -> tuple[socket.socket, dict[str, Any]]:
    """Return the socket that is this process's standard input, and the options that its first line holds.

    The standard input is replaced by an empty one.
    """
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    line = b""
    while not line.endswith(b"\n"):  # byte by byte: what follows belongs to the episodes
        if not (byte := connection.recv(1)):
            sys.exit("the actor has closed the connection")
        line += byte
    return connection, json.loads(line)


def run_to_its_end(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on a new event loop, even if a task of user code raises `SystemExit` or `KeyboardInterrupt`.

    asyncio raises these two out of the event loop, which would end the episodes of all other tasks as well.
    """
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(main)
        while not task.done():
            try:
                loop.run_until_complete(task)
            except (SystemExit, KeyboardInterrupt):
                traceback.print_exc()
        task.result()


async def serve(connection: socket.socket, play: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]) -> None:
    """Report readiness, and play the episodes that are requested until the socket closes; cancel the rest.

    `play` is called with the request, and returns the fields of the message about the episode's end. Whatever `play`
    raises or returns, one end is sent for each episode.
    """
    reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_LINE)
    running: dict[str, asyncio.Task[None]] = {}
    own = os.getpid()

    async def run(order: dict[str, Any]) -> None:
        try:
            ended = await play(order)
        except BaseException as error:  # the code of an episode may raise anything
            task = asyncio.current_task()
            is_ours = isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling()
            how, reason = ("cancelled", "cancelled") if is_ours else ("raised", _described(error))
            ended = {"how": how, "reason": reason}
        if os.getpid() != own:
            os._exit(0)  # the code has forked, and only the original process may answer
        writer.write(_end_line(order["begin"], ended))

    writer.write(b'{"ready": true}\n')
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


def _end_line(name: str, ended: dict[str, Any]) -> bytes:
    """Encode an episode's end, with texts of at most `LONGEST_REASON` characters; always succeeds."""
    try:
        cut = {key: value[:LONGEST_REASON] if isinstance(value, str) else value for key, value in ended.items()}
        return json.dumps({"ended": name, **cut}).encode() + b"\n"
    except (ValueError, TypeError, RecursionError) as error:
        reason = f"the end of the episode cannot be sent: {_described(error)}"
        return json.dumps({"ended": name, "how": "raised", "reason": reason}).encode() + b"\n"


async def _played(environment: Any, tasks: Any, order: dict[str, Any]) -> dict[str, Any]:
    import verifiers.v1 as vf

    index = order["task"]["metadata"].get("index")
    if not isinstance(index, int):
        return {"how": "raised", "reason": 'the task has no number; use source = "numbered"'}
    if isinstance(tasks, list):
        if index >= len(tasks):
            reason = f"the taskset has {len(tasks)} tasks and no number {index}; lower parameters.count to {len(tasks)}"
            return {"how": "raised", "reason": reason}
        task = tasks[index]
    else:
        task = next(itertools.islice(iter(tasks), index, None))
    context = vf.ModelContext(
        model="policy", client=vf.EvalClientConfig(base_url=order["base_url"]), sampling=vf.Sampling()
    )
    episode = await environment.run_episode(task, context)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if any("episode_over" in error.message or "context_length" in error.message for error in errors):
        return {"how": "over", "reason": "a limit of the episode was reached before the taskset could score it"}
    if errors:
        last = errors[-1]
        return {"how": "raised", "reason": f"{_place(last.traceback or '')}{last.type}: {last.message}"}
    return {"how": "returned", "value": float(sum(trace.reward for trace in episode.traces if trace.agent.trainable))}


def _described(error: BaseException) -> str:
    try:
        place, root = _place("".join(traceback.format_exception(error))), error
        while place and isinstance(root.__cause__, Exception):
            root = root.__cause__
        return f"{place}{type(root).__name__}: {root}"[:LONGEST_REASON]
    except BaseException:  # methods of an exception may raise anything
        return f"{type(error).__name__}, whose message cannot be read"


def _place(text: str) -> str:
    """Return `file:line: ` of a traceback's innermost frame outside of packages and the standard library."""
    left_out = ("<", sys.base_prefix, __file__)
    places = re.findall(r'File "([^"]+)", line (\d+)', text)
    own = [f"{file}:{line}: " for file, line in places if "-packages" not in file and not file.startswith(left_out)]
    return own[-1] if own else ""


def _offer_chat_harness() -> None:
    """Register `ChatHarness` with verifiers. It is defined here, since verifiers can be imported only at run time."""
    import openai
    import verifiers.v1 as vf
    from verifiers.v1.dialects.chat import message_to_wire

    # All episodes share these connections: a new client reads the trusted certificates, which takes longer than a turn.
    connections = openai.DefaultAsyncHttpxClient(timeout=_LONGEST_TURN_S)

    class ChatHarnessConfig(vf.HarnessConfig):
        """Configuration of `ChatHarness`, which has no settings of its own."""

    class ChatHarness(vf.Harness[ChatHarnessConfig]):
        """An agent in this process, without tools. Each launch by verifiers requests one answer."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **_: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt)
            messages = [*([{"role": "system", "content": system}] if system else []), *given]
            client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, http_client=connections)
            try:
                await client.chat.completions.create(model=ctx.model, messages=messages)
            except openai.APIStatusError as error:
                return vf.ProgramResult(exit_code=1, stdout="", stderr=str(error))
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    module = types.ModuleType(_HARNESS)
    ChatHarness.__module__ = ChatHarnessConfig.__module__ = _HARNESS
    vars(module).update(ChatHarness=ChatHarness, ChatHarnessConfig=ChatHarnessConfig, __all__=["ChatHarness"])
    sys.modules[_HARNESS] = module


if __name__ == "__main__":
    main()
