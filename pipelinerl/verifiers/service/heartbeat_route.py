"""`HeartbeatRoute`: a route that responds at once, sends heartbeats while work runs, and ends with its caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, final

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from pipelinerl.system.http_service import refusal

#: Interval of heartbeats: a working service sends a space before its answer.
HEARTBEAT_S: Final = 1.0


class RequestRefused(Exception):
    """The request is not accepted here: status and code of the response, and the reason."""

    def __init__(self, status: int, code: str, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.code = code


@final
class HeartbeatRoute:
    """POST of one type of request. It is an ASGI application (an instance), so it notices when clients disconnect."""

    #: Started work; it returns the answer.
    Work = Coroutine[Any, Any, msgspec.Struct]

    def __init__(self, request: Any, begin: Callable[[Any], Work]) -> None:
        """Create the route; `begin` takes the decoded `request`, or raises `RequestRefused`."""
        self._type = request
        self._begin = begin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            work = self._begin(msgspec.json.decode(await Request(scope, receive).body(), type=self._type))
        except ClientDisconnect:
            return
        except msgspec.ValidationError as error:  # names the expected type and path, never the content
            await refusal(422, str(error), code="invalid_request_error")(scope, receive, send)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # msgspec lets the last two through unchanged
            await refusal(400, "the body must be JSON", code="invalid_json")(scope, receive, send)
        except RequestRefused as refused:
            await refusal(refused.status, str(refused), code=refused.code)(scope, receive, send)
        else:
            await self._answered(work, receive, send)

    async def _answered(self, work: Work, receive: Receive, send: Send) -> None:
        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(receive())
        try:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while not working.done():
                await asyncio.wait({working, leaving}, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    return
                if not working.done():
                    await send({"type": "http.response.body", "body": b" ", "more_body": True})
            body = msgspec.json.encode(working.result())
            await send({"type": "http.response.body", "body": body, "more_body": False})
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)
