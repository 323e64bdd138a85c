"""Messages between rank 0 and the other ranks, in msgpack: calls of the trainer contract's methods, and answers.

Values are plain data. A class is sent as `module:Class`; only dataclasses and enums of the objective are accepted.
"""

from __future__ import annotations

import importlib
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from pipelinerl.trainers.ranks.shared_block import Place
from trainer_contract.errors import RankError, SpecError
from trainer_contract.types import MicroBatch, TrainerSpec

#: Packages whose dataclasses and enums may be part of an objective that is sent.
_OBJECTIVES: Final = ("pipelinerl.objective.", "pipelinerl.numerics.", "trainer_contract.")


class Lane(StrEnum):
    """A queue of commands that every rank executes in the same order; different lanes run concurrently."""

    PASSES = "passes"
    """Commands that compute on all processes at once."""
    READS = "reads"
    """Commands that only read the weights, concurrently with the passes."""


class Columns(msgspec.Struct, frozen=True):
    """One micro-batch as a message: dtype, shape and bytes of each column."""

    arrays: dict[str, tuple[str, tuple[int, ...], bytes]]
    num_segments: int


class StartCommand(msgspec.Struct, frozen=True, tag=True):
    """Command: run `init_worker` of trainer number `trainer`; a process may hold several, such as policy and critic."""

    trainer: int
    spec: dict[str, Any]


class ForwardCommand(msgspec.Struct, frozen=True, tag=True):
    """Command: run `forward`, in `rounds` passes on every rank, as passes have collectives; the last may be dummies."""

    trainer: int
    batches: list[Columns]
    rounds: int


class ForwardAt(msgspec.Struct, frozen=True, tag=True):
    """Command: run `forward_at` on these micro-batches; rank 0 sends the weights by the array library's collectives."""

    trainer: int
    batches: list[Columns]
    rounds: int


class Backward(msgspec.Struct, frozen=True, tag=True):
    """Command: run `backward` on these micro-batches, with `rounds` passes as in `ForwardCommand`."""

    trainer: int
    batches: list[Columns]
    rounds: int
    objective: Any


class StepCommand(msgspec.Struct, frozen=True, tag=True):
    """Command: run `optimizer_step`."""

    trainer: int
    learning_rate: float


class Discard(msgspec.Struct, frozen=True, tag=True):
    """Command: run `discard_gradient`."""

    trainer: int


class GatheredKind(StrEnum):
    """The kind of value that `Gather` collects for a parameter: its weight or one of its moments."""

    WEIGHTS = "weights"
    """The weight as engines receive it."""
    MASTER = "master"
    """The fp32 weight that the optimizer trains."""
    MEAN = "exp_avg"
    SQUARE = "exp_avg_sq"


class Gather(msgspec.Struct, frozen=True, tag=True):
    """Command: help gather `count` parameters on rank 0, from position `place` of the parameter list on.

    `into` is shared memory of rank 0, into which ranks on its host write their shards; other ranks send theirs.
    """

    trainer: int
    place: int
    kind: GatheredKind = GatheredKind.WEIGHTS
    count: int = 1
    into: Place | None = None


class Save(msgspec.Struct, frozen=True, tag=True):
    """Command: run `save_state`, which writes this rank's shards into a directory that all ranks can access."""

    trainer: int
    path: str


class Close(msgspec.Struct, frozen=True, tag=True):
    """Command: close one trainer."""

    trainer: int


Command = StartCommand | ForwardCommand | ForwardAt | Backward | StepCommand | Discard | Gather | Save | Close


class Numbered(msgspec.Struct, frozen=True, tag=True):
    """A command with its number; the answers to the command have the same number."""

    number: int
    lane: Lane
    command: Command


class RanksEnd(msgspec.Struct, frozen=True, tag=True):
    """Notice that rank 0 ends: `reason` is empty if the work is done, else it says why rank 0 gave up."""

    reason: str = ""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message that a rank sends to rank 0 after connecting."""

    rank: int
    processes: int
    token: str


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Notice that all ranks have connected; the array library's rendezvous is at `port` on the coordinator's host."""

    port: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Rank 0's reply to a `Hello` that it rejects, such as one with a wrong token."""

    reason: str


class RankResult(msgspec.Struct, frozen=True):
    """The result for one micro-batch: bytes of f32 [T] log-probs or values, and the loss (0 without backward)."""

    predictions: bytes
    loss: float = 0.0


class RankAnswer(msgspec.Struct, frozen=True, tag=True):
    """A rank's answer to command `number`: `results`, or class (`error`) and text (`sentence`) of a `TrainerError`."""

    number: int
    results: list[RankResult] = []
    error: str = ""
    sentence: str = ""


Message = Numbered | RanksEnd | Hello | Welcome | Refused | RankAnswer
_DECODER: Final = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Encode a message as msgpack."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> Message:
    """Decode a message. Raises RankError for an unknown type, which means that ranks run different versions."""
    try:
        return _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise RankError(
            f"a message between the trainer's ranks cannot be decoded: {error}; install the same version everywhere"
        ) from error


def encode_batch(batch: MicroBatch) -> Columns:
    """Encode the columns of a micro-batch that are not None."""
    columns = {field.name: getattr(batch, field.name) for field in fields(batch)}
    arrays = {name: (c.dtype.str, c.shape, c.tobytes()) for name, c in columns.items() if isinstance(c, np.ndarray)}
    return Columns(arrays, batch.num_segments)


def decode_batch(columns: Columns) -> MicroBatch:
    """Decode a micro-batch, the inverse of `encode_batch`; its arrays are read-only."""
    arrays: dict[str, Any] = {
        name: np.frombuffer(data, dtype).reshape(shape) for name, (dtype, shape, data) in columns.arrays.items()
    }
    return MicroBatch(num_segments=columns.num_segments, **arrays)


def encode_spec(spec: TrainerSpec) -> dict[str, Any]:
    """Convert the spec to plain values, without the option `distributed`, which differs between ranks."""
    options = {name: value for name, value in spec.options.items() if name != "distributed"}
    plain: dict[str, Any] = msgspec.to_builtins(spec, enc_hook=_plain_path)
    return plain | {"options": options}


def decode_spec(plain: Mapping[str, Any]) -> TrainerSpec:
    """Rebuild the spec, the inverse of `encode_spec`."""
    return msgspec.convert(plain, TrainerSpec, dec_hook=lambda kind, value: kind(value))


def _plain_path(value: Any) -> str:
    if isinstance(value, Path):
        return str(value.absolute())
    raise SpecError(f"options must be plain values to reach the other ranks, got {value!r}")


def encode_objective(value: Any) -> Any:
    """Convert an objective to plain values. Raises SpecError for a class that is not part of an objective."""
    kind = type(value)
    if isinstance(value, Enum) and _is_known(kind.__module__):
        return {"class": _name(kind), "value": value.value}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, frozenset):
        return {"set": sorted(encode_objective(each) for each in value)}
    if isinstance(value, tuple):
        return {"tuple": [encode_objective(each) for each in value]}
    if is_dataclass(value) and _is_known(kind.__module__):
        parts = {field.name: encode_objective(getattr(value, field.name)) for field in fields(value) if field.init}
        return {"class": _name(kind), "fields": parts}
    raise SpecError(
        f"an objective that trains on several processes must be made of {', '.join(_OBJECTIVES)}* alone, "
        f"got {_name(kind)}; train on one process"
    )


def decode_objective(plain: Any) -> Any:
    """Rebuild an objective, the inverse of `encode_objective`. Raises RankError for classes that may not be sent."""
    if not isinstance(plain, dict):
        return plain
    if "set" in plain:
        return frozenset(decode_objective(each) for each in plain["set"])
    if "tuple" in plain:
        return tuple(decode_objective(each) for each in plain["tuple"])
    module, _, name = plain["class"].partition(":")
    kind = getattr(importlib.import_module(module), name, None) if _is_known(module) else None
    if isinstance(kind, type) and issubclass(kind, Enum) and "value" in plain:
        return kind(plain["value"])
    if isinstance(kind, type) and is_dataclass(kind) and "fields" in plain:
        return kind(**{part: decode_objective(value) for part, value in plain["fields"].items()})
    raise RankError(
        f"rank 0 names {plain['class']!r}, which is not part of an objective here; install the same version everywhere"
    )


def _is_known(module: str) -> bool:
    return module.startswith(_OBJECTIVES)


def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


_LENGTH: Final = struct.Struct("<Q")
#: Upper bound of a message's size; a larger message cannot come from one of our ranks.
_MOST_BYTES: Final = 1 << 32
#: Number of heartbeats sent per `silence_s`, the silence after which a peer counts as lost.
_BEATS: Final = 6


class Channel:
    """One end of a connection between ranks. One thread may call `receive`; any thread may call `send`."""

    def __init__(self, connection: socket.socket, *, peer: str, silence_s: float) -> None:
        connection.settimeout(silence_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self.peer = peer
        self._silence_s = silence_s
        self._sending = threading.Lock()
        self._closed = threading.Event()

    def beat(self) -> None:
        threading.Thread(target=self._beat, name=f"beat-{self.peer}", daemon=True).start()

    def send(self, message: bytes) -> None:
        """Send a message. Raises RankError if the peer is gone, or accepts no data for `silence_s`."""
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
        self._closed.set()
        with suppress(OSError):  # raised if the connection is already closed
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
