"""`WeightServer`, a minimal server to pull weights from, with failures that the kit can trigger.

It serves only `routes.WEIGHTS`, whole or in ranges, to requests with the token. It does not support shared memory.
"""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self, final

from inference_contract import routes


@final
class WeightServer:
    """A server of weights, which listens from construction until the `with` block ends.

    Attributes:
        requests: paths of authenticated requests.
        breaks_at: byte offset of a version at which connections are closed; None disables this.
        open: answers wait until this event is set.
    """

    def __init__(self, host: str, token: str | None) -> None:
        self.token = token
        self.requests: list[str] = []
        self.breaks_at: int | None = None
        self.open = threading.Event()
        self.open.set()
        self._held: dict[str, bytes] = {}
        held = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30.0

            def do_GET(self) -> None:
                held.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()

    def hold(self, epoch: int, version: int, data: bytes) -> None:
        """Serve `data` as the weights of this epoch and version."""
        self._held[routes.WEIGHTS.format(epoch=epoch, version=version)] = data

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one GET."""
        if self.token is not None and handler.headers["authorization"] != f"Bearer {self.token}":
            self._send(handler, 401, b"", {})
            return
        self.requests.append(handler.path)
        data = self._held.get(handler.path)
        if data is None:
            self._send(handler, 404, b"", {})
            return
        self.open.wait(30.0)
        byte_range = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers["range"] or "")
        start = int(byte_range[1]) if byte_range else 0
        end = int(byte_range[2]) + 1 if byte_range and byte_range[2] else len(data)
        part = {"content-range": f"bytes {start}-{end - 1}/{len(data)}"} if byte_range else {}
        limit = len(data) if self.breaks_at is None else self.breaks_at
        self._send(handler, 206 if byte_range else 200, data[start:end], part, sent=max(limit - start, 0))

    @staticmethod
    def _send(
        handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str], sent: int | None = None
    ) -> None:
        handler.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body if sent is None else body[:sent])
        if sent is not None and sent < len(body):
            handler.close_connection = True
