"""Connections to a parameter server: the client `ServerClient` and its messages.

Bytes move directly between the socket and the caller's memory, without a buffer. Every call ends by its deadline; a
read also ends after `STALL_S` without a byte. Another thread can end a call immediately, by calling `cut`. An error
that the server reports is raised by the client as the same class. If a server is unreachable, `ServerLost` names it.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from inference_contract.errors import from_wire
from inference_contract.weights import MOST_EPOCH, MOST_VERSION, BaseUrl, WeightLayout
from inference_contract.wire import Wire
from pipelinerl.errors import DeadlineError, ServerLost, UpdateError
from pipelinerl.plugins.parameter_server.shared_memory import SharedMemoryAddress
from pipelinerl.system import http_client
from pipelinerl.weights.pull import Range

#: Key of a version: (epoch, version). All versions of a later trainer sort after those of an earlier trainer.
Key = tuple[int, int]
#: Longest pause in seconds between two bytes that a server sends. Answers for which the server computes may take
#: longer.
STALL_S: Final = 10.0
_FAILURES: Final = (OSError, http.client.HTTPException)

Answer = TypeVar("Answer", bound=Wire)


class ServerClient:
    """A connection to a server that is opened on demand and kept. One thread uses it at a time, except for `cut`."""

    def __init__(self, url: str, *, token: str | None) -> None:
        self.url = url
        self._connection = http_client.byte_connection(url)
        self._headers = http_client.authorization(token)
        self._is_cut = False

    def close(self) -> None:
        self._connection.close()

    def cut(self) -> None:
        """Make the call in which another thread is waiting fail, and every later call too."""
        self._is_cut = True
        connected = self._connection.sock
        if connected is not None:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    def call(
        self, method: str, path: str, answer: type[Answer], body: Wire | None = None, *, deadline: float
    ) -> Answer:
        """Send `body` as JSON; return the parsed `answer`. Raises its ContractError; UpdateError or DeadlineError
        without one.
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
        """PUT `data` at offset `start` of a version of `num_bytes` bytes. Raises the same errors as `call`."""
        headers = {"content-range": f"bytes {start}-{start + len(data) - 1}/{num_bytes}"}
        self._exchange("PUT", path, headers, data, deadline=deadline)

    def read(self, path: str, into: memoryview, start: int, *, deadline: float) -> None:
        """GET a version's bytes from offset `start`, until `into` is filled. Raises the same errors as `call`."""
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
                response.read()  # read the end of the body, so that the connection can be reused
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
        """Send a request; return the response, unread. Reconnect once if the server closed the idle connection."""
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
            if self._is_cut:  # `cut` may have been called before the connection had a socket
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


VERSIONS: Final = "/versions"
VERSION: Final = "/versions/{epoch}/{version}"
SEAL: Final = "/versions/{epoch}/{version}/seal"
COPY: Final = "/versions/{epoch}/{version}/copy"
PROGRESS: Final = "/progress"


class ShardSpec(Wire):
    """The part of a version that a server holds: shard `number` of `count`, as divided by `WeightLayout.shards`."""

    number: int = Field(default=0, ge=0)
    count: int = Field(default=1, ge=1, le=256)
    bucket_bytes: int = Field(default=16 * 2**20, ge=1)

    @model_validator(mode="after")
    def _number_in_count(self) -> Self:
        if self.number >= self.count:
            raise ValueError(f"number must be below count {self.count}, got {self.number}")
        return self

    def ranges(self, layout: WeightLayout) -> tuple[Range, ...]:
        return tuple(layout.shards(self.count, self.bucket_bytes)[self.number])

    def __str__(self) -> str:
        return f"shard {self.number} of {self.count} (buckets of {self.bucket_bytes} bytes)"


class Announcement(Wire):
    """Announces a version before its bytes are sent; `progress` maps each member (engine or server) to its version."""

    epoch: int = Field(ge=0, lt=MOST_EPOCH)
    version: int = Field(ge=0, lt=MOST_VERSION)
    layout: WeightLayout
    shard: ShardSpec = ShardSpec()
    progress: dict[str, Key | None] = Field(default_factory=dict)


class Seal(Wire):
    """Asks to serve a shard, if its bytes have this `digest`; `whole` is the digest of the whole version."""

    digest: str
    whole: str


class CopyOrder(Wire):
    """Request that a server fetch the bytes of an announced version from another server instead of the trainer."""

    source: BaseUrl
    digest: str
    whole: str
    timeout_s: float = Field(gt=0, le=3600)


class ProgressReport(Wire):
    """The version that each member (engine or server) has; servers stop holding versions for others."""

    epoch: int = Field(ge=0, lt=MOST_EPOCH)
    progress: dict[str, Key | None]


class VersionRecord(Wire):
    """One version as held by one server, which may hold only a part of it.

    `num_bytes` is the size of the whole version; `shard` names the server's part. `digest` is the digest of that part,
    `whole` that of the whole version; both are None until the part is sealed (complete, checked and served). A process
    on the same host can map the memory at `segment`, which has the size of the whole version; only the part is valid.
    """

    epoch: int
    version: int
    layout_id: str
    num_bytes: int
    shard: ShardSpec
    digest: str | None
    whole: str | None
    segment: SharedMemoryAddress | None


class ServerState(Wire):
    """The versions held, at most `room`, oldest first; the newest `saved` on disk; the members' versions."""

    epoch: int
    room: int
    versions: tuple[VersionRecord, ...]
    progress: dict[str, Key | None]
    saved: Key | None
