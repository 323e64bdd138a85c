"""The gateway, which serves OpenAI's API on a loopback address of the actor's process to the agents of its episodes.

    agent ── POST /e/{secret}/{agent}/v1/chat/completions ──▶ `Episode` ──▶ engine ──▶ `Episode` ──▶ agent

An episode's secret is part of the path, or the API key of a client that calls `/v1/chat/completions`. A wrong secret,
and a request after the episode has ended, get status 404. Errors have statuses that OpenAI's client does not retry (it
retries 408, 409, 429 and 5xx). A client that disconnects cancels its request.

| waits for | unblocked by | or, at the latest |
|---|---|---|
| a body | the agent | `BODY_TIMEOUT_S` |
| an answer | the engine, or the agent disconnects | the engine pool's deadline, or the episode's |
| a call of a tool | the tool, or the agent disconnects | the tool's own limits, or the episode's deadline |
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar, final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inference_contract import routes
from inference_contract.errors import ContextExceeded, ContractError, InvalidRequest
from inference_contract.schemas import ChatCompletion, ChatCompletionRequest, ChatMessage
from inference_contract.tools import ToolCall
from pipelinerl.answers.thinking import split
from pipelinerl.environments.environment import UNTRAINED
from pipelinerl.environments.episode import Episode, PlannedTurn, RecordedTurn
from pipelinerl.environments.tool_loop import Toolbox, names_of
from pipelinerl.errors import PipelineError
from pipelinerl.system.http_service import guard, listen, refused_body, serving, url_of

#: Function that samples one turn. Raises `ContractError` or `PipelineError` if no engine can do it.
SampleTurn = Callable[[ChatCompletionRequest], Awaitable[ChatCompletion]]
T = TypeVar("T")

_LOOPBACK: Final = "127.0.0.1"
#: HTTP status if no engine could answer: one that clients do not retry, since the engine pool has already retried.
_NO_ENGINE: Final = 424
_MODEL: Final = "policy"
_MAIN: Final = "main"
_ENDED: Final = "there is no such episode, or it has ended"

log = logging.getLogger("pipelinerl")


@final
@dataclass(slots=True, eq=False)
class OpenEpisode:
    """An open episode, the function that samples its turns, and the address at which agents reach it."""

    episode: Episode
    sample: SampleTurn
    base: str
    tools: Toolbox | None = None
    failure: Exception | None = None
    """The error if no engine could answer; the episode then gets no verdict."""
    tool_failure: str = ""
    """The reason if one of the recipe's tools failed without the model's fault; the episode is then not trained on."""

    def base_url(self, agent: str = _MAIN) -> str:
        """Return the base URL for the agent's OpenAI client."""
        return f"{self.base}/e/{self.episode.secret}/{agent}/v1"


@final
class Gateway:
    """The open episodes of one actor, on one event loop."""

    def __init__(self) -> None:
        self._episodes: dict[str, OpenEpisode] = {}
        self._base = ""
        self._is_closing = False

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        """Listen until the `async with` block ends."""
        listener = listen(_LOOPBACK, 0)
        self._base = url_of(_LOOPBACK, listener.getsockname()[1])
        app = Starlette()
        app.mount("/", self._answer)
        guard(app, token=None)
        async with serving(app, listener):
            try:
                yield
            finally:
                self._is_closing = True

    @asynccontextmanager
    async def open(
        self, episode: Episode, sample: SampleTurn, tools: Toolbox | None = None
    ) -> AsyncIterator[OpenEpisode]:
        """Accept requests of the agents of `episode` until the `async with` block ends."""
        opened = OpenEpisode(episode, sample, self._base, tools)
        self._episodes[episode.secret] = opened
        try:
            yield opened
        finally:
            del self._episodes[episode.secret]

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            try:
                response = await self._response(Request(scope, receive))
            except ContractError as error:
                response = _json(error.to_wire(), error.status if error.status < 500 else _NO_ENGINE)
            except HTTPException as error:
                response = refused_body(error)
            await response(scope, receive, send)
        except ClientDisconnect:
            log.debug("an agent left before its answer")
        except asyncio.CancelledError:
            if not self._is_closing:
                raise

    async def _response(self, request: Request) -> Response:
        opened, agent, path = self._addressee(request)
        match request.method, path:
            case "GET", routes.MODELS:
                return _json({"object": "list", "data": [{"id": _MODEL, "object": "model"}]})
            case "POST", routes.CHAT_COMPLETIONS:
                body = await _body(request)
                completion = await _unless_gone(_completed(opened, agent, body), request.receive)
                if body.get("stream"):
                    return _stream(completion, body)
                return _json(_openai(completion, "chat.completion", "message"))
            case "POST", "/reward":
                _reward(opened.episode, agent, await _body(request))
                return _json({})
        raise _NotFound(f"{request.method} {path}")

    def _addressee(self, request: Request) -> tuple[OpenEpisode, str, str]:
        """Return a request's episode, its agent's name, and its path in OpenAI's API."""
        path = str(request.scope["path"])
        if path.startswith("/e/"):
            secret, _, rest = path[3:].partition("/")
            agent, _, rest = rest.partition("/")
            path = f"/{rest}"
        else:
            secret, agent = request.headers.get("authorization", "").rpartition(" ")[2], _MAIN
        opened = self._episodes.get(secret)
        if opened is None or not hmac.compare_digest(opened.episode.secret, secret):
            raise _NotFound(_ENDED)
        return opened, agent or _MAIN, path


async def _completed(opened: OpenEpisode, agent: str, body: Mapping[str, Any]) -> ChatCompletion:
    if opened.tools is not None and not agent.startswith(UNTRAINED):
        return await _sampled_with_tools(opened, opened.tools, agent, body)
    completion, _, _ = await _sampled(opened, agent, body)
    return completion


async def _sampled(
    opened: OpenEpisode, agent: str, body: Mapping[str, Any], within: PlannedTurn | None = None
) -> tuple[ChatCompletion, PlannedTurn, RecordedTurn]:
    episode = opened.episode
    planned = episode.plan(agent, body, trains=not agent.startswith(UNTRAINED), within=within)
    with episode.sampling(planned):
        try:
            completion = await opened.sample(planned.request)
            return completion, planned, episode.record(planned, completion)
        except ContextExceeded as error:
            episode.over = f"the conversation has filled the context: {error.message}"
            episode.was_refused = True
            raise
        except InvalidRequest:
            raise  # the agent's request is invalid: it gets the error, and the episode continues
        except (ContractError, PipelineError) as error:
            opened.failure = error
            raise ContractError(f"no engine could answer: {error}") from error


async def _sampled_with_tools(
    opened: OpenEpisode, tools: Toolbox, agent: str, body: Mapping[str, Any]
) -> ChatCompletion:
    """Sample answers and run their calls of the recipe's tools, until an answer is meant for the agent; return it.

    An answer that calls only the recipe's tools is continued with their results. One that also calls the agent's tools
    is returned with the calls of the agent's tools alone. When the agent continues, the results of the recipe's tools
    are inserted before the agent's new messages.
    """
    own = body.get("tools") or ()
    names = names_of(own)
    request = {**body, "tools": tools.offered_with(own)}
    original: PlannedTurn | None = None
    while True:
        completion, planned, turn = await _sampled(opened, agent, request, original)
        original = original or planned
        message = completion.choices[0].message
        calls = [call for call in message.tool_calls or () if call.function.name not in names]
        results = await _results(opened, tools, calls, ", ".join(sorted(names)))
        if calls and len(calls) == len(message.tool_calls or ()):
            answer = message.model_dump(exclude_none=True)
            request["messages"] = [
                *request["messages"],
                answer,
                *(each.model_dump(exclude_none=True) for each in results),
            ]
            continue
        turn.results = results
        left = [call for call in message.tool_calls or () if call.function.name in names]
        shown = message.model_copy(update={"tool_calls": left or None})
        opened.episode.recognise(original, shown, turn)
        choice = completion.choices[0].model_copy(update={"message": shown})
        return completion.model_copy(update={"choices": [choice]})


async def _results(opened: OpenEpisode, tools: Toolbox, calls: Sequence[ToolCall], known: str) -> list[ChatMessage]:
    results = []
    for call in calls:
        try:
            message, failed = await tools.result(call, known)
        except PipelineError as error:
            opened.tool_failure = f"the tool {call.function.name} failed: {error}"
            raise InvalidRequest(opened.tool_failure) from error
        opened.episode.calls.failed += failed
        results.append(message)
    return results


def _reward(episode: Episode, agent: str, body: Mapping[str, Any]) -> None:
    value = body.get("reward")
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e6 <= value <= 1e6:
        raise InvalidRequest("reward must be a finite number within ±1e6", param="reward")
    if (turn := episode.last_of(agent)) is None:
        raise InvalidRequest(
            f"reward: no answer to the agent {agent!r} trains; ask the model first, with a client that trains",
            param="reward",
        )
    turn.reward += value


@final
class _NotFound(InvalidRequest):
    status = 404
    code = "episode_not_found"


def _openai(completion: ChatCompletion, kind: str, part: str) -> dict[str, Any]:
    """Convert an engine's answer to OpenAI's form, without token ids, log-probs and spans.

    `kind` is OpenAI's type of the object; `part` is the key of the message, `message` or `delta`.
    """
    choice = completion.choices[0]
    message = choice.message.model_dump(exclude_none=True)
    thinking, message["content"] = split(message["content"])
    if thinking:
        message["reasoning_content"] = thinking
    if calls := message.get("tool_calls"):
        message["content"] = message["content"] or None
        if part == "delta":
            message["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
    return {
        "id": completion.id,
        "object": kind,
        "created": completion.created,
        "model": completion.model,
        "choices": [{"index": 0, part: message, "finish_reason": choice.finish_reason.value, "logprobs": None}],
        "usage": completion.usage.model_dump(),
    }


def _stream(completion: ChatCompletion, body: Mapping[str, Any]) -> Response:
    chunk = _openai(completion, "chat.completion.chunk", "delta")
    usage = chunk.pop("usage")
    events = [chunk]
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append({**chunk, "choices": [], "usage": usage})
    data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    return Response(data, media_type="text/event-stream")


def _json(body: Mapping[str, Any], status: int = 200) -> Response:
    # Unlike `JSONResponse`, `json.dumps` escapes lone surrogates, which an agent's request may contain.
    return Response(json.dumps(body), status, media_type="application/json")


async def _body(request: Request) -> Mapping[str, Any]:
    try:
        body = json.loads(await request.body() or b"{}")
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


async def _unless_gone(work: Awaitable[T], receive: Receive) -> T:
    """Return the result of `work`; cancel `work` and raise `ClientDisconnect` if the client disconnects first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(receive())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
