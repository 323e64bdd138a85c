"""`Channel`: a connection between rank 0 of a trainer and another rank: whole messages, a beat, and silence found.

    frame:  length u64 little-endian, then so many bytes; of length 0 it is a beat

Each side beats from a thread of its own, whatever it computes meanwhile, so a peer that lives is heard within
`silence_s`. Promises: a peer that died is found at once (its connection ends), one that hangs, or a network that
swallows, within `silence_s`; either is a `RankError` that names the peer.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from typing import Final, final

from trainer_contract.errors import RankError

_LENGTH: Final = struct.Struct("<Q")
#: No message is larger; what claims to be is not ours.
_MOST_BYTES: Final = 1 << 32
#: Beats sent within the silence after which a peer is lost.
_BEATS: Final = 6


@final
class Channel:
    """One end. `receive` is for one thread; `send` for any."""

    def __init__(self, connection: socket.socket, *, peer: str, silence_s: float) -> None:
        connection.settimeout(silence_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self.peer = peer
        self._silence_s = silence_s
        self._sending = threading.Lock()
        self._closed = threading.Event()

    def beat(self) -> None:
        """Begin to beat, until `close`."""
        threading.Thread(target=self._beat, name=f"beat-{self.peer}", daemon=True).start()

    def send(self, message: bytes) -> None:
        """Send a message. Raises RankError when the peer does not take it."""
        self._write(_LENGTH.pack(len(message)) + message)

    def receive(self, *, most_bytes: int = _MOST_BYTES) -> bytes:
        """The next message, beats left out. Raises RankError when the peer is gone, or silent for too long."""
        while True:
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
            if length > most_bytes:
                raise RankError(f"{self.peer} sent a message of {length} bytes, at most {most_bytes} are expected")
            if length:
                return self._read(length)

    def close(self) -> None:
        """End the connection, which the peer sees at once."""
        self._closed.set()
        with suppress(OSError):  # it has ended already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _beat(self) -> None:
        while not self._closed.wait(self._silence_s / _BEATS):
            try:
                self._write(_LENGTH.pack(0))
            except RankError:
                return  # whoever receives or sends next meets it, too

    def _write(self, data: bytes) -> None:
        with self._sending:
            try:
                self._connection.sendall(data)
            except TimeoutError:
                raise RankError(f"{self.peer} took nothing for {self._silence_s:g} s: it hangs") from None
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
                    f"{self.peer} was not heard for {self._silence_s:g} s: it hangs, or the network to it is gone"
                ) from None
            except OSError as error:
                raise RankError(f"{self.peer} is gone: {error}") from error
            if not received:
                raise RankError(f"{self.peer} is gone: it ended the connection")
            filled += received
        return bytes(data)
