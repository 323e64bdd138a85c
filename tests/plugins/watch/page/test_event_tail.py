"""The live page reads each complete line of an event log once, even if the file grows or is replaced."""

import json

from pipelinerl.plugins.watch.page import event_tail
from pipelinerl.plugins.watch.page.event_tail import EventTail


def lines(*numbers, size=0):
    return b"".join(json.dumps({"kind": "x", "n": n, "pad": "p" * size}).encode() + b"\n" for n in numbers)


def read_all(tail):
    numbers = []
    while True:
        piece = tail.read()
        numbers += [event["n"] for event in piece.events]
        if not tail.is_behind:
            return numbers


def test_event_tail_reads_an_appended_line_only_when_the_line_is_complete(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = EventTail(path)
    assert tail.read().events == [] and tail.share == 1.0
    whole = lines(3)
    path.write_bytes(lines(1, 2) + whole[:10])
    assert read_all(tail) == [1, 2] and read_all(tail) == []
    with path.open("ab") as file:
        file.write(whole[10:] + lines(4))
    assert read_all(tail) == [3, 4]


def test_malformed_event_lines_are_skipped_and_counted(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"{}\n[1]\nnot json\n\xff\n" + b"[" * 5000 + b"\n" + lines(1) + b'{"kind": 3}\n\n' + lines(2))
    tail = EventTail(path)
    assert read_all(tail) == [1, 2] and tail.unreadable == 7


def test_event_tail_reads_a_long_log_in_pieces_and_skips_overlong_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(event_tail, "_PIECE_BYTES", 256)
    monkeypatch.setattr(event_tail, "_MOST_BYTES", 4096)
    path = tmp_path / "events.jsonl"
    path.write_bytes(lines(*range(50)) + lines(50, size=3000) + lines(*range(51, 60)))
    tail = EventTail(path)
    first = tail.read()
    assert 0 < len(first.events) < 50 and 0 < tail.share < 1
    assert len(first.events) + len(read_all(tail)) == 60
    with path.open("ab") as file:
        file.write(lines(60, size=20_000) + lines(61))
    assert read_all(tail) == [61] and tail.unreadable > 0, "an overlong line is skipped and counted"


def test_event_tail_reads_a_replaced_log_from_its_beginning(tmp_path):
    path, other = tmp_path / "events.jsonl", tmp_path / "other"
    path.write_bytes(lines(1, 2))
    tail = EventTail(path)
    read_all(tail)
    other.write_bytes(lines(7, 8, 9))
    other.rename(path)
    piece = tail.read()
    assert piece.is_new_file and [event["n"] for event in piece.events] == [7, 8, 9]
    path.write_bytes(lines(5))
    piece = tail.read()
    assert piece.is_new_file and [event["n"] for event in piece.events] == [5]
