"""`ServerClient`: one blocking connection to a parameter server, for the threads that push and pull.

Bytes move directly between the socket and the caller's memory, with no buffer between. Every call ends by its deadline;
a read also ends after `STALL_S` without a byte. `cut` ends a call at once from another thread. An error reported by the
server is raised here as the same class. A server that is unreachable raises a `ServerLost` that names it.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar, final

from pydantic import ValidationError

from inference_contract.errors import from_wire
from inference_contract.wire import Wire
from pipelinerl.errors import DeadlineError, ServerLost, UpdateError
from pipelinerl.system import http_client

#: Longest pause in seconds between two bytes of a working server. An answer that needs work may take longer.
STALL_S: Final = 10.0
_FAILURES: Final = (OSError, http.client.HTTPException)

Answer = TypeVar("Answer", bound=Wire)


@final
class ServerClient:
    """A connection that is opened on demand and kept. One thread uses it at a time, except for `cut`."""

    def __init__(self, url: str, *, token: str | None) -> None:
        self.url = url
        self._connection = http_client.byte_connection(url)
        self._headers = http_client.authorization(token)
        self._is_cut = False

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        self._connection.close()

    def cut(self) -> None:
        """Fail the call in which another thread waits, and every later call."""
        self._is_cut = True
        connected = self._connection.sock
        if connected is not None:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    def call(
        self, method: str, path: str, answer: type[Answer], body: Wire | None = None, *, deadline: float
    ) -> Answer:
        """Exchange JSON: send `body` and return the parsed answer.

        Raises:
            ContractError: the server reported it.
            UpdateError, DeadlineError: the server did not answer, or its answer is not that of a parameter server.
        """
        content = None if body is None else body.model_dump_json(exclude_none=True).encode()
        headers = {"content-type": "application/json"} if content else {}
        text = self._exchange(method, path, headers, content, deadline=deadline)
        try:
            return answer.model_validate_json(text)
        except ValidationError:
            raise UpdateError(
                f"{self.url}{path} must answer with a {answer.__name__}; is it a parameter server?"
            ) from None

    def write(self, path: str, data: memoryview, start: int, num_bytes: int, *, deadline: float) -> None:
        """PUT the bytes that begin at `start` of a version of `num_bytes`; raises as `call` does."""
        headers = {"content-range": f"bytes {start}-{start + len(data) - 1}/{num_bytes}"}
        self._exchange("PUT", path, headers, data, deadline=deadline)

    def read(self, path: str, into: memoryview, start: int, *, deadline: float) -> None:
        """Fill `into` with the bytes that begin at `start`; raises as `call` does."""
        if not len(into):
            return
        headers = {"range": f"bytes={start}-{start + len(into) - 1}"}
        try:
            with self._begun("GET", path, headers, None, deadline=deadline) as response:
                if response.status != http.client.PARTIAL_CONTENT or response.length != len(into):
                    self._refuse(path, response)
                at = 0
                while at < len(into):
                    count = response.readinto(into[at:])
                    if not count:
                        raise ServerLost(f"{self.url} closed the connection after {start + at} bytes")
                    at += count
                response.read()  # reads the end of the body, so that the connection can be reused
        except _FAILURES as error:
            raise self._failed(f"GET {path}", error, deadline) from error

    def _exchange(self, method: str, path: str, headers: Mapping[str, str], body: Any, *, deadline: float) -> bytes:
        try:
            with self._begun(method, path, headers, body, deadline=deadline) as response:
                if response.status >= 300:
                    self._refuse(path, response)
                return response.read()
        except _FAILURES as error:
            raise self._failed(f"{method} {path}", error, deadline) from error

    def _begun(
        self, method: str, path: str, headers: Mapping[str, str], body: Any, *, deadline: float
    ) -> http.client.HTTPResponse:
        """Return the response, unread. Reconnect once if the server closed the connection while it was idle."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("its deadline has passed")
        kept = self._connection.sock is not None
        self._connection.timeout = min(left, STALL_S) if "range" in headers else left
        try:
            if kept:
                self._connection.sock.settimeout(self._connection.timeout)
            else:
                self._connection.connect()
            if self._is_cut:  # the other thread may have come before there was a socket to shut down
                raise OSError("it was cut off")
            self._connection.request(method, path, body=body, headers={**self._headers, **headers})
            return self._connection.getresponse()
        except (ConnectionError, http.client.BadStatusLine):
            self.close()
            if not kept:
                raise
        return self._begun(method, path, headers, body, deadline=deadline)

    def _refuse(self, path: str, response: http.client.HTTPResponse) -> None:
        try:
            body = json.loads(response.read(2**16))
        except ValueError:
            body = None
        if response.status < 400:
            self.close()
            raise UpdateError(f"{self.url}{path} must answer with exactly the requested range, got {response.status}")
        raise from_wire(response.status, body)

    def _failed(self, doing: str, error: Exception, deadline: float) -> ServerLost | DeadlineError:
        self.close()
        if isinstance(error, TimeoutError) and time.monotonic() >= deadline - 0.01:
            return DeadlineError(f"parameter server {self.url}: {doing} was not answered in time")
        reason = str(error) or type(error).__name__
        return ServerLost(f"parameter server {self.url}: {doing} failed: {reason}")
