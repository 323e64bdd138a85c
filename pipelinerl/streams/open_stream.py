"""`open_stream`: the stream server that an address names. `memory://` is this process; `redis://…` is a server."""

from __future__ import annotations

from pipelinerl.errors import AddressError
from pipelinerl.observability.redaction import without_secrets
from pipelinerl.streams.memory_stream import MemoryStream
from pipelinerl.streams.redis_stream import RedisStream
from pipelinerl.streams.stream import Stream


async def open_stream(url: str, *, namespace: str, timeout_s: float = 10.0, max_length: int = 100_000) -> Stream:
    """Open `url`. Each call with `memory://` is a new, empty server, to be passed to all who shall share it.

    Args:
        namespace: prefix of all keys on a server, so that several runs may share it.
        timeout_s: how long a server may be away before an `AddressError`.
        max_length: bound on the entries of each stream, see `Stream.room`.

    Raises:
        AddressError: the address is malformed, nobody answers there, or the password is refused.
    """
    scheme = url.partition("://")[0]
    if scheme == "memory":
        return MemoryStream(max_length=max_length)
    if scheme in ("redis", "rediss", "unix"):
        return await RedisStream.connect(url, namespace=namespace, timeout_s=timeout_s, max_length=max_length)
    raise AddressError(
        f"a stream server's address must be memory:// or redis://host:port, got {without_secrets(url)!r}"
    )
