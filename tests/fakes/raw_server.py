"""A server on a socket that sends any bytes, for responses that no HTTP library would send."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress

Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def raw_server(handler):
    """Serve on loopback and yield the URL; `handler` gets each request's head and writes what is sent back."""

    async def serve(reader, writer):
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                sizes = [line for line in head.lower().splitlines() if line.startswith(b"content-length:")]
                await reader.readexactly(int(sizes[0].partition(b":")[2]) if sizes else 0)
                await handler(head, writer)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def response(body, *, status=200, **headers):
    """Return the bytes of a response; underscores in the names of headers become hyphens."""
    fields = {"content-length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} x\r\n{lines}\r\n".encode() + body


def sending(content):
    async def send(head, writer):
        writer.write(content)

    return send
