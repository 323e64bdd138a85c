"""The gateway, which serves the model on a loopback address of the actor's process to the agents of its episodes.

    agent ── POST /e/{secret}/{agent}/v1/chat/completions ──▶ `Episode` ──▶ engine ──▶ `Episode` ──▶ agent

Agents speak OpenAI's chat API, its Responses API, or Anthropic's Messages API; `agent_api` translates the last two to
the first. An episode's secret is part of the path, or the API key of a client that calls `/v1/…`. A wrong secret, and a
request after the episode has ended, get status 404. Errors have statuses that these clients do not retry (they retry
408, 409, 429 and 5xx). A client that disconnects cancels its request.

An answer is streamed as the engine samples it. If its engine fails and another one samples other tokens, the stream
breaks off, and the episode gets no verdict. With tools of the recipe, a stream begins when the answer is complete,
since only then it is known whether the agent sees it.

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
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from inference_contract import routes
from inference_contract.errors import ContextExceeded, ContractError, InvalidRequest
from inference_contract.schemas import AssistantMessage, ChatCompletion, ChatCompletionRequest, ChatMessage
from inference_contract.tools import ToolCall
from pipelinerl.errors import PipelineError
from pipelinerl.plugins.episodes.agent_api.answer import (
    MODEL,
    AgentAnswer,
    AgentCall,
    AnswerChanged,
    AnswerReader,
    ChatCall,
)
from pipelinerl.plugins.episodes.agent_api.messages import MessagesCall, error_body
from pipelinerl.plugins.episodes.agent_api.responses import History, ResponsesCall
from pipelinerl.plugins.episodes.environment import UNTRAINED
from pipelinerl.plugins.episodes.episode import Episode, PlannedTurn, RecordedTurn
from pipelinerl.plugins.episodes.tool_loop import Toolbox, names_of
from pipelinerl.system.http_service import guard, listen, refused_body, serving, unless_gone, url_of

#: Function that gets the whole text of an answer so far, again and again while it is sampled.
OnText = Callable[[str], None]
#: The plan of an agent's request, and the turn with its answer.
Recorded = tuple[PlannedTurn, RecordedTurn]

_LOOPBACK: Final = "127.0.0.1"
#: HTTP status if no engine could answer: one that clients do not retry, since the engine pool has already retried.
_NO_ENGINE: Final = 424
_MAIN: Final = "main"
_ENDED: Final = "there is no such episode, or it has ended"

log = logging.getLogger("pipelinerl")


class SampleTurn(Protocol):
    """Function that samples one turn. Raises `ContractError` or `PipelineError` if no engine can do it."""

    async def __call__(self, request: ChatCompletionRequest, on_text: OnText | None = None, /) -> ChatCompletion:
        """Return the answer. With `on_text`, also report its text while it is sampled."""
        ...


@dataclass(slots=True, eq=False)
class OpenEpisode:
    """An open episode, the function that samples its turns, and the address at which agents reach it."""

    episode: Episode
    sample: SampleTurn
    gateway: Gateway
    tools: Toolbox | None = None
    failure: Exception | None = None
    """The error if no engine could answer; the episode then gets no verdict."""
    fault: str = ""
    """The reason if a tool of the recipe or a stream failed without the model's fault; the episode then does not train.
    """
    responses: History = field(default_factory=dict)
    """The messages of the answers that the Responses API has given."""

    def base_url(self, agent: str = _MAIN) -> str:
        """Return the base URL for the agent's OpenAI client; Anthropic's client takes it without `/v1`."""
        return f"{self.gateway.base}/e/{self.episode.secret}/{agent}/v1"


class Gateway:
    """The open episodes of one actor, on one event loop."""

    def __init__(self) -> None:
        self._episodes: dict[str, OpenEpisode] = {}
        self.base = ""
        self.model_thinks = False
        """True once an answer began with thinking without an opening tag, which is then in the prompt."""
        self._is_closing = False

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        """Listen until the `async with` block ends."""
        listener = listen(_LOOPBACK, 0)
        self.base = url_of(_LOOPBACK, listener.getsockname()[1])
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
        opened = OpenEpisode(episode, sample, self, tools)
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
                response: ASGIApp = await self._response(Request(scope, receive))
            except ContractError as error:
                status = error.status if error.status < 500 else _NO_ENGINE
                in_messages = "/v1/messages" in str(scope["path"])
                response = _json(error_body(error, status) if in_messages else error.to_wire(), status)
            except HTTPException as error:
                response = refused_body(error)
            await response(scope, receive, send)
        except ClientDisconnect:
            log.debug("an agent left before its answer")
        except asyncio.CancelledError:
            if not self._is_closing:
                raise

    async def _response(self, request: Request) -> ASGIApp:
        opened, agent, path = self._addressee(request)
        match request.method, path:
            case "GET", routes.MODELS:
                return _json({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
            case "POST", routes.CHAT_COMPLETIONS:
                return await _answered(opened, agent, ChatCall(await _body(request)), request.receive)
            case "POST", "/v1/messages":
                return await _answered(opened, agent, MessagesCall(await _body(request)), request.receive)
            case "POST", "/v1/responses":
                call = ResponsesCall(await _body(request), opened.responses)
                return await _answered(opened, agent, call, request.receive)
            case "POST", "/v1/messages/count_tokens":
                chat = MessagesCall(await _body(request)).chat
                return _json({"input_tokens": await unless_gone(_prompt_tokens(opened, agent, chat), request.receive)})
            case "POST", "/reward":
                _reward(opened.episode, agent, await _body(request))
                return _json({})
        raise _NotFound(f"{request.method} {path}")

    def _addressee(self, request: Request) -> tuple[OpenEpisode, str, str]:
        """Return a request's episode, its agent's name, and its path in the API."""
        path = str(request.scope["path"])
        if path.startswith("/e/"):
            secret, _, rest = path[3:].partition("/")
            agent, _, rest = rest.partition("/")
            path = f"/{rest}"
        else:
            headers = request.headers
            secret = headers.get("authorization", "").rpartition(" ")[2] or headers.get("x-api-key", "")
            agent = _MAIN
        opened = self._episodes.get(secret)
        if opened is None or not hmac.compare_digest(opened.episode.secret, secret):
            raise _NotFound(_ENDED)
        return opened, agent or _MAIN, path


async def _answered(opened: OpenEpisode, agent: str, call: AgentCall, receive: Receive) -> ASGIApp:
    """Return the response to an agent's request: a stream, or one body."""
    if call.chat.get("stream") is True:
        events = _events(opened, agent, call)
        return _EventStream(await unless_gone(anext(events), receive), events)
    answer, _ = await unless_gone(_completed(opened, agent, call.chat), receive)
    return _json(call.whole(answer))


async def _completed(
    opened: OpenEpisode, agent: str, body: Mapping[str, Any], on_text: OnText | None = None
) -> tuple[AgentAnswer, Recorded]:
    if opened.tools is not None and not agent.startswith(UNTRAINED):
        completion, recorded = await _sampled_with_tools(opened, opened.tools, agent, body)
    else:
        completion, planned, turn = await _sampled(opened, agent, body, on_text=on_text)
        recorded = planned, turn
    answer = AgentAnswer.of(completion)
    opened.gateway.model_thinks |= answer.thinks_without_tag
    return answer, recorded


async def _events(opened: OpenEpisode, agent: str, call: AgentCall) -> AsyncGenerator[bytes]:
    """Yield the events of a streamed answer. An error is raised before the first event, and is an event after it."""
    content, changed = "", asyncio.Event()

    def on_text(text: str) -> None:
        nonlocal content
        content = text
        changed.set()

    work = asyncio.ensure_future(_completed(opened, agent, call.chat, on_text))
    work.add_done_callback(lambda _: changed.set())
    reader, has_begun = AnswerReader(thinks=opened.gateway.model_thinks), False
    try:
        while not work.done():
            await changed.wait()
            changed.clear()
            for piece in reader.more(content):
                has_begun = True
                yield call.piece(piece)
        answer, (planned, turn) = work.result()
        for piece in reader.rest(answer.content):
            yield call.piece(piece)
        # The agent will repeat what it has read.
        read = AssistantMessage(content=reader.shown(answer.content)[1], tool_calls=list(answer.calls) or None)
        opened.episode.recognise(planned, read, turn)
        yield call.end(answer)
    except AnswerChanged:
        opened.fault = "an engine failed while its answer was streamed, and another engine sampled other tokens"
        yield call.broken(ContractError(opened.fault))
    except ContractError as error:
        if not has_begun:
            raise
        yield call.broken(error)
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def _prompt_tokens(opened: OpenEpisode, agent: str, body: Mapping[str, Any]) -> int:
    """Return the number of tokens of a request's prompt, which only an engine knows: it samples one token after it."""
    if opened.tools is not None and not agent.startswith(UNTRAINED):
        body = {**body, "tools": opened.tools.offered_with(_tools_in(body))}
    try:
        return (await opened.sample(opened.episode.measured(agent, body))).usage.prompt_tokens
    except PipelineError as error:
        raise ContractError(f"no engine could answer: {error}") from error


async def _sampled(
    opened: OpenEpisode,
    agent: str,
    body: Mapping[str, Any],
    within: PlannedTurn | None = None,
    on_text: OnText | None = None,
) -> tuple[ChatCompletion, PlannedTurn, RecordedTurn]:
    episode = opened.episode
    planned = episode.plan(agent, body, trains=not agent.startswith(UNTRAINED), within=within)
    with episode.sampling(planned):
        try:
            completion = await opened.sample(planned.request, on_text)
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


def _tools_in(body: Mapping[str, Any]) -> list[Any]:
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise InvalidRequest("tools: must be a list", param="tools")
    return tools


async def _sampled_with_tools(
    opened: OpenEpisode, tools: Toolbox, agent: str, body: Mapping[str, Any]
) -> tuple[ChatCompletion, Recorded]:
    """Sample answers and run their calls of the recipe's tools, until an answer is meant for the agent; return it.

    An answer that calls only the recipe's tools is continued with their results. One that also calls the agent's tools
    is returned with the calls of the agent's tools alone. When the agent continues, the results of the recipe's tools
    are inserted before the agent's new messages.
    """
    own = _tools_in(body)
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
        return completion.model_copy(update={"choices": [choice]}), (original, turn)


async def _results(opened: OpenEpisode, tools: Toolbox, calls: Sequence[ToolCall], known: str) -> list[ChatMessage]:
    results = []
    for call in calls:
        try:
            message, failed = await tools.result(call, known)
        except PipelineError as error:
            opened.fault = f"the tool {call.function.name} failed: {error}"
            raise InvalidRequest(opened.fault) from error
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


class _NotFound(InvalidRequest):
    status = 404
    code = "episode_not_found"


class _EventStream:
    """An ASGI response of server-sent events, `first` and then `events`; a client that disconnects ends them."""

    def __init__(self, first: bytes, events: AsyncGenerator[bytes]) -> None:
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await unless_gone(self._sent(send), receive)

    async def _sent(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for part in self._events:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _json(body: Mapping[str, Any], status: int = 200) -> Response:
    # `json.dumps` escapes the lone surrogates that a model's tokens may decode to; `JSONResponse` raises.
    return Response(json.dumps(body), status, media_type="application/json")


async def _body(request: Request) -> Mapping[str, Any]:
    """Return the request's JSON object. Too deep nesting, lone surrogates, NaN and infinity are rejected too."""
    try:
        body = from_json(await request.body() or b"{}", allow_inf_nan=False)
        json.dumps(body, allow_nan=False)  # raises for 1e999, which is read as infinity
    except ValueError as error:
        raise InvalidRequest(f"the body must be a JSON object: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body
