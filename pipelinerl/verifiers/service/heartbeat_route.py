"""`HeartbeatRoute`: a route that responds at once, sends heartbeats while its work runs, and cancels the work if the
client leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, final

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from pipelinerl.system.http_service import refusal

#: Interval of heartbeats: until a working service answers, it sends a space each time.
HEARTBEAT_S: Final = 1.0


class RequestRefused(Exception):
    """The request is not accepted here; holds the response's status and code, and the reason."""

    def __init__(self, status: int, code: str, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.code = code


@final
class HeartbeatRoute:
    """A POST route for one type of request. As an ASGI application (an instance), it notices when clients
    disconnect.
    """

    #: Work that has been started; awaiting it returns the answer.
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
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # msgspec passes on the last two unchanged
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
