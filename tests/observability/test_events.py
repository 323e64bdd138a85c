"""The event log keeps whole lines, even if its writer is killed or the disk is full."""

import math
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipelinerl.observability import events
from pipelinerl.observability.events import EventFollower, EventLog, read_events
from tests.fakes import small_disk
from tests.patience import PATIENCE_S, SOON_S

ROOT = Path(__file__).resolve().parents[2]


def test_events_are_read_back_as_they_were_written(tmp_path):
    path = tmp_path / "run" / "events.jsonl"
    with EventLog(path, clock=lambda: 12.3456) as log:
        log.write("step", step=1, reward=0.5)
        log.write("knobs", changes={"staleness.k": math.inf}, who="ü", rows=[1.0, (math.nan,)])
    assert path.read_text().splitlines()[0] == '{"time":12.346,"kind":"step","step":1,"reward":0.5}'
    knobs = {"time": 12.346, "kind": "knobs", "changes": {"staleness.k": None}, "who": "ü", "rows": [1.0, [None]]}
    assert read_events(path)[1] == knobs, "JSON has no infinities"


@pytest.mark.parametrize("torn", [b'{"time":1,"ki', b"x", b"y" * 100_000])
def test_incomplete_last_line_is_ignored_by_readers_and_removed_by_the_writer(tmp_path, torn):
    path = tmp_path / "e"
    with EventLog(path) as log:
        log.write("step", step=1)
    with path.open("ab") as file:
        file.write(torn)
    assert [event["step"] for event in read_events(path)] == [1]
    with EventLog(path) as log:
        log.write("step", step=2)
    assert [event["step"] for event in read_events(path)] == [1, 2]


def test_events_written_before_the_writer_is_killed_are_kept(tmp_path):
    path = tmp_path / "e"
    code = (
        "import os, pathlib, signal, sys\nfrom pipelinerl.observability.events import EventLog\n"
        "log = EventLog(pathlib.Path(sys.argv[1]))\n"
        "for step in range(50): log.write('step', step=step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, timeout=PATIENCE_S)
    assert ended.returncode == -signal.SIGKILL
    assert [event["step"] for event in read_events(path)] == list(range(50))


def _kept_and_written(place, path):
    """Check that the first `write` or `close` after space is freed writes all pending records, in order."""
    with EventLog(path) as log:
        log.write("step", step=0)
        small_disk.fill(place)
        began = time.monotonic()
        for step in range(1, 400):
            log.write("step", step=step, text="x" * 50)
        assert time.monotonic() - began < SOON_S, "writing to a full disk does not block"
        kept = len(read_events(path))
        assert 0 < kept < 400 and not path.read_bytes().endswith(b"\n"), "the disk is full in the middle of a line"
        assert log.count_recent(step=0) == log.count_recent(step=399) == 1
        assert log.no_room == f"{path}: No space left on device"
        small_disk.free(place)
        log.write("step", step=400)
        assert log.no_room == ""
        assert [event["step"] for event in read_events(path)] == list(range(401))
        small_disk.fill(place)
        for step in range(401, 800):
            log.write("step", step=step, text="x" * 50)
        assert len(read_events(path)) < 800
        threading.Timer(1.0, small_disk.free, [place]).start()
    assert [event["step"] for event in read_events(path)] == list(range(800))


def _given_up(place, path):
    log = EventLog(path, timeout_s=0.3)
    small_disk.fill(place)
    log.write("step", step=0, text="x" * 50_000)
    time.sleep(0.4)
    for wait in (lambda: log.write("step", step=1), log.close):
        with pytest.raises(OSError, match="No space left"):
            wait()
    log.close()


@pytest.mark.parametrize("scene", [_kept_and_written, _given_up])
def test_event_log_on_a_full_disk_writes_its_records_once_there_is_space_or_raises_after_a_timeout(tmp_path, scene):
    if reason := small_disk.why_not(tmp_path):
        pytest.skip(f"no disk of a size of one's own: {reason}")
    code = (
        "import pathlib, sys\nimport tests.observability.test_events as scenes\n"
        "place = pathlib.Path(sys.argv[1])\ngetattr(scenes, sys.argv[2])(place, place / 'events.jsonl')"
    )
    words = [sys.executable, "-c", code, str(tmp_path), scene.__name__]
    command = [*small_disk.command(tmp_path, size="128k"), *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stderr


def test_event_follower_reads_each_record_once_while_the_log_grows(tmp_path):
    path = tmp_path / "events.jsonl"
    follower = EventFollower(path)
    assert follower.new() == [], "a missing log has no events"
    path.write_bytes(b'{"kind":"a"}\n{"kind":"b"}\n{"ki')
    assert [event["kind"] for event in follower.new()] == ["a", "b"]
    assert follower.offset == 26 and follower.new() == [], "an incomplete last line is not read"
    with path.open("ab") as file:
        file.write(b'nd":"c"}\n')
    assert [event["kind"] for event in EventFollower(path, offset=follower.offset).new()] == ["c"]


def test_event_follower_reads_a_log_in_pieces_without_splitting_records(tmp_path):
    path = tmp_path / "events.jsonl"
    lines = [b'{"kind":"a","x":"%s"}\n' % (b"x" * size) for size in (3, 500, 3, 3)]
    path.write_bytes(b"".join(lines))
    follower, pieces = EventFollower(path), []
    while piece := follower.new(most_bytes=64):
        pieces.append(len(piece))
    assert sum(pieces) == 4 and len(pieces) > 1
    assert len(list(EventFollower(path).all())) == 4


def test_event_follower_reads_a_replaced_or_shortened_log_from_its_beginning(tmp_path):
    path, other = tmp_path / "events.jsonl", tmp_path / "other"
    path.write_bytes(b'{"kind":"a"}\n{"kind":"b"}\n')
    follower = EventFollower(path)
    assert len(follower.new()) == 2 and not follower.is_replaced
    for kinds, write in (("cde", lambda data: (other.write_bytes(data), other.rename(path))), ("f", path.write_bytes)):
        write(b"".join(b'{"kind":"%c"}\n' % ord(kind) for kind in kinds))
        assert "".join(event["kind"] for event in follower.new()) == kinds and follower.is_replaced
    assert follower.new() == [] and not follower.is_replaced and follower.share == 1.0


def test_event_follower_skips_overlong_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "_MOST_BYTES", 4096)
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind":"a","x":"%s"}\n' % (b"x" * 3000) + b"y" * 20_000 + b'\n{"kind":"b"}\n')
    follower = EventFollower(path)
    assert [event["kind"] for event in follower.new(most_bytes=256)] == ["a"] and 0 < follower.share < 1
    assert [event["kind"] for event in follower.new(most_bytes=256)] == ["b"] and not follower.is_behind


def test_readers_skip_and_log_lines_that_are_not_events(tmp_path, caplog):
    """Such lines come from a crash of the machine, from hand edits, or from two writers of an old version."""
    path = tmp_path / "events.jsonl"
    bad = [b"nonsense", b'{"kind":"st', b"[1]", b'{"kind":7}', b"\xff", b"[" * 9999, b'{"time":1}']
    path.write_bytes(b'{"kind":"a"}\n' + b"\n".join(bad) + b'\n{"kind":"b"}\n')
    for read in (read_events, lambda path: list(EventFollower(path).all())):
        assert [event["kind"] for event in read(path)] == ["a", "b"]
        assert len(caplog.messages) == len(bad) and "skipping a line that is not an event" in caplog.text
        caplog.clear()
    assert EventFollower(path, offset=13).new(most_bytes=16)[0]["kind"] == "b", "a piece of bad lines is not the end"
    with EventLog(path) as log:
        assert log.count_recent(kind="b") == 1


def test_only_one_process_writes_to_an_event_log(tmp_path):
    path = tmp_path / "events.jsonl"
    first = EventLog(path)
    first.write("a")
    with path.open("ab") as file:
        file.write(b"torn")  # what a second writer could take for a torn tail
    with pytest.raises(BlockingIOError, match="is being written by another process"):
        EventLog(path)
    assert path.read_bytes().endswith(b"torn")
    closing = threading.Timer(0.2, first.close)
    closing.start()
    with EventLog(path, lock_s=PATIENCE_S) as second:
        second.write("b")
    assert [event["kind"] for event in read_events(path)] == ["a", "b"]
