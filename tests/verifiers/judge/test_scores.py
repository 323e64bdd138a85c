"""Parsing of a score from a reply: exactly one score within the range, or an error."""

from __future__ import annotations

import re

import pytest

from pipelinerl.verifiers.judge.scores import ScoreFormat, Unreadable

JSON = ScoreFormat(low=1, high=10)
PATTERN = ScoreFormat(low=0, high=5, pattern=re.compile(r"Score: (\S+)"))


@pytest.mark.parametrize(
    ("reply", "score", "reason"),
    [
        ('{"score": 7, "reason": "good"}', 7, "good"),
        ('Let me think {well}.\n```json\n{"reason": "a } b", "score": 1.5}\n```', 1.5, "a } b"),
        ('{"score": 3} So I say {"score": 3.0, "reason": "r"}', 3, "r"),
        ('{"reason": 5, "score": 10}', 10, ""),
    ],
)
def test_single_score_in_a_reply_is_read(reply: str, score: float, reason: str) -> None:
    assert JSON.read(reply) == (score, reason)


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        ("", "said no score"),
        ("seven", "said no score: 'seven'"),
        ('{"score": "7"}', "no score"),
        ('{"score": true}', "no score"),
        ('{"score": NaN}', "no score"),
        ('{"score": 1e999}', "no score"),
        ('{"score": 11}', "the score 11, which is not from 1 to 10"),
        ('{"score": 0.99}', "not from 1 to 10"),
        ('{"score": 1} {"score": 10}', "more than one score: 1, 10"),
        ('{"score": ' + "1" * 100_000 + "}", "no score"),
        ("{" * 100_000, "braces and no end"),
        ('{"a":' * 150, "no score"),
    ],
)
def test_reply_without_a_single_valid_score_is_rejected(reply: str, sentence: str) -> None:
    with pytest.raises(Unreadable, match=sentence):
        JSON.read(reply)


def test_pattern_reads_the_score_from_its_group() -> None:
    assert PATTERN.read("So.\nScore: 4.5") == (4.5, "")
    for reply, sentence in (("4", "no score"), ("Score: 9", "not from 0 to 5"), ("Score: x", "'x' for a score"),
                            ("Score: 1 Score: 2", "more than one"), ("Score: nan", "no score")):  # fmt: skip
        with pytest.raises(Unreadable, match=sentence):
            PATTERN.read(reply)


def test_score_is_mapped_to_a_share_of_its_range() -> None:
    assert [JSON.share(score) for score in (1, 10, 5.5)] == [0, 1, 0.5]
