"""`Channel`, a connection between rank 0 of a trainer and another rank, with whole messages and heartbeats.

    frame:  length u64 little-endian, then that many bytes; length 0 is a heartbeat

Each peer sends heartbeats from a separate thread, whatever else it computes, so a live peer sends something within
`silence_s`. A dead peer is detected at once (its connection closes). A hanging peer, or a network that drops packets,
is detected within `silence_s`. Both cases raise a `RankError` that names the peer.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from typing import Final, final

from trainer_contract.errors import RankError

_LENGTH: Final = struct.Struct("<Q")
#: Upper bound of a message's size; a larger message cannot come from one of our ranks.
_MOST_BYTES: Final = 1 << 32
#: Number of heartbeats sent per `silence_s`, the silence after which a peer counts as lost.
_BEATS: Final = 6


@final
class Channel:
    """One end of the connection. One thread may call `receive`; any thread may call `send`."""

    def __init__(self, connection: socket.socket, *, peer: str, silence_s: float) -> None:
        connection.settimeout(silence_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self.peer = peer
        self._silence_s = silence_s
        self._sending = threading.Lock()
        self._closed = threading.Event()

    def beat(self) -> None:
        """Start sending heartbeats, until `close`."""
        threading.Thread(target=self._beat, name=f"beat-{self.peer}", daemon=True).start()

    def send(self, message: bytes) -> None:
        """Send a message. Raises RankError if the peer does not accept it."""
        self._write(_LENGTH.pack(len(message)) + message)

    def receive(self, *, most_bytes: int = _MOST_BYTES) -> bytes:
        """Return the next message, skipping heartbeats. Raises RankError if the peer is gone or silent for too long."""
        while True:
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
            if length > most_bytes:
                raise RankError(f"{self.peer} sent a message of {length} bytes, at most {most_bytes} are expected")
            if length:
                return self._read(length)

    def close(self) -> None:
        """Close the connection; the peer notices at once."""
        self._closed.set()
        with suppress(OSError):  # already closed
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _beat(self) -> None:
        while not self._closed.wait(self._silence_s / _BEATS):
            try:
                self._write(_LENGTH.pack(0))
            except RankError:
                return  # the next `send` or `receive` raises the same error

    def _write(self, data: bytes) -> None:
        with self._sending:
            try:
                self._connection.sendall(data)
            except TimeoutError:
                raise RankError(f"{self.peer} accepted no data for {self._silence_s:g} s: it hangs") from None
            except OSError as error:
                raise RankError(f"{self.peer} is gone: {error}") from error

    def _read(self, count: int) -> bytes:
        data = bytearray(count)
        view, filled = memoryview(data), 0
        while filled < count:
            try:
                received = self._connection.recv_into(view[filled:])
            except TimeoutError:
                raise RankError(
                    f"{self.peer} sent nothing for {self._silence_s:g} s: it hangs, or the network to it is down"
                ) from None
            except OSError as error:
                raise RankError(f"{self.peer} is gone: {error}") from error
            if not received:
                raise RankError(f"{self.peer} is gone: it ended the connection")
            filled += received
        return bytes(data)
