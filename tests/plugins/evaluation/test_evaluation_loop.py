"""The answer log keeps complete answers, drops incomplete ones, and rejects a file written with other settings."""

from __future__ import annotations

import msgspec
import pytest

from pipelinerl.errors import UserError
from pipelinerl.plugins.evaluation.evaluation_loop import answer_log

ASKED = {"target": "model", "samples": 4}


def refused(path, sentence, **settings):
    with pytest.raises(UserError, match=sentence), answer_log(path, ASKED | settings, NumberedAnswer):
        pass


class NumberedAnswer(msgspec.Struct, frozen=True):
    number: int


@pytest.mark.parametrize("cut", range(60))
def test_answer_log_cut_off_at_any_byte_keeps_its_complete_answers(tmp_path, cut):
    path = tmp_path / "deep" / "answers.jsonl"
    with answer_log(path, ASKED, NumberedAnswer) as log:
        for number in (0, 1):
            log.add(NumberedAnswer(number))
            assert path.read_bytes().count(b"\n") == 2 + number, "an answer is written before it is counted"
    whole = path.read_bytes()
    left = whole[: len(whole) - cut]
    path.write_bytes(left)
    kept = max(0, left.count(b"\n") - 1)
    with answer_log(path, ASKED, NumberedAnswer) as log:
        assert log.answers == [NumberedAnswer(number) for number in range(kept)]
        for number in range(kept, 2):
            log.add(NumberedAnswer(number))
    assert path.read_bytes() == whole


def test_answer_log_with_other_settings_or_a_file_that_is_no_answer_log_is_rejected(tmp_path):
    path = tmp_path / "answers.jsonl"
    with answer_log(path, ASKED, NumberedAnswer) as log:
        log.add(NumberedAnswer(1))
    before = path.read_bytes()
    refused(path, r"another question \(another samples\); name another --out", samples=8)
    assert path.read_bytes() == before
    for notes in ("some notes of mine\n", "a first line\nand a second", "no line at all"):
        path.write_text(notes)
        refused(path, r"another question \(another target, samples\)")
        assert path.read_text() == notes, "a file that is no answer log is not changed"
    path.write_bytes(before + b'{"number": "one"}\n')
    refused(path, "is damaged: ")
    refused(tmp_path, "cannot be written: Is a directory")


def test_second_writer_of_an_answer_log_is_rejected(tmp_path):
    path = tmp_path / "answers.jsonl"
    with answer_log(path, ASKED, NumberedAnswer):
        refused(path, "another process writes")
    with answer_log(path, ASKED, NumberedAnswer) as log:
        assert log.answers == [], "the lock ends with the block"
