"""`open_stream` opens the stream server at an address: `memory://` is this process, `redis://…` is a server."""

from __future__ import annotations

from pipelinerl.errors import AddressError
from pipelinerl.observability.logs import without_secrets
from pipelinerl.streams.memory_stream import MemoryStream
from pipelinerl.streams.redis_stream import RedisStream
from pipelinerl.streams.stream import Stream


async def open_stream(url: str, *, namespace: str, timeout_s: float = 10.0, max_length: int = 100_000) -> Stream:
    """Open `url`. Each `memory://` call creates a new, empty server; pass the result to every user of it.

    Args:
        namespace: prefix of all keys on a server, so that several runs can share it.
        timeout_s: longest outage of the server before an `AddressError`.
        max_length: bound on the entries of each stream; see `Stream.room`.

    Raises:
        AddressError: the address is malformed, no server answers, or the password is rejected.
    """
    scheme = url.partition("://")[0]
    if scheme == "memory":
        return MemoryStream(max_length=max_length)
    if scheme in ("redis", "rediss", "unix"):
        return await RedisStream.connect(url, namespace=namespace, timeout_s=timeout_s, max_length=max_length)
    raise AddressError(
        f"a stream server's address must be memory:// or redis://host:port, got {without_secrets(url)!r}"
    )
