"""Reader of TensorBoard event files that works like TensorBoard's own: it verifies checksums and applies restarts."""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path

from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event, SessionLog


def _masked(data: bytes) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def records(path: Path) -> list[Event]:
    """Return every record of a file; raise `AssertionError` if a record is torn or damaged."""
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        header = data[at : at + 8]
        (length,) = struct.unpack("<Q", header)
        body = data[at + 12 : at + 12 + length]
        assert struct.unpack("<I", data[at + 8 : at + 12])[0] == _masked(header)
        assert struct.unpack("<I", data[at + 12 + length : at + 16 + length])[0] == _masked(body)
        found.append(Event.FromString(body))
        at += 16 + length
    assert found[0].file_version == "brain.Event:2"
    return found


def points(directory: Path) -> Counter[tuple[str, int, float]]:
    """Return how often each (metric name, step, value) occurs in all event files of the directory."""
    found: Counter[tuple[str, int, float]] = Counter()
    for path in sorted(directory.glob("events.out.tfevents.*")):
        for event in records(path):
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                assert not [name for name, step, _ in found if step >= event.step], "a restart discards later values"
            for value in event.summary.value:
                found[value.tag, event.step, round(value.simple_value, 5)] += 1
    return found


def series(directory: Path, name: str) -> list[tuple[int, float]]:
    """Return the (step, value) pairs of one metric, including repeated pairs."""
    return sorted((step, value) for tag, step, value in points(directory).elements() if tag == name)
