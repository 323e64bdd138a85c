"""Strict and loose matching of instructions, and the resulting rewards."""

from __future__ import annotations

import pytest

from pipelinerl.instructions.catalogue import made
from pipelinerl.instructions.scoring import Matching, Score, followed, variants

NO_COMMA = made("punctuation:no_comma", {})
LOWERCASE = made("change_case:english_lowercase", {})
JSON = made("detectable_format:json_format", {})


def test_loose_matching_ignores_first_line_last_line_and_asterisks():
    answer = "Sure, here it is:\n**so it is**\nAnything else, Sir?"
    assert followed([NO_COMMA, LOWERCASE], answer) == [False, False]
    assert followed([NO_COMMA, LOWERCASE], answer, Matching.LOOSE) == [True, True]
    assert followed([JSON], "*{}*", Matching.LOOSE) == [True]
    assert followed([LOWERCASE], "a\nB\nc", Matching.LOOSE) == [False]


@pytest.mark.parametrize("matching", Matching)
@pytest.mark.parametrize("blank", ["", " \n\t"])
def test_blank_answer_follows_no_instruction(blank: str, matching: Matching):
    assert followed([NO_COMMA], blank, matching) == [False]


def test_loose_matching_does_not_reward_an_answer_of_one_removed_line():
    assert followed([NO_COMMA], "a, b", Matching.LOOSE) == [False]


def test_loose_matching_tries_eight_variants_of_the_answer():
    assert len(variants("*a*\n*b*\n*c*")) == 8
    assert variants("a") == ["a", ""]


def test_score_is_the_share_of_followed_instructions_or_all_or_nothing():
    assert [Score.SHARE.of(each) for each in ([True, False], [True, True], [False])] == [0.5, 1.0, 0.0]
    assert [Score.ALL.of(each) for each in ([True, False], [True, True], [False])] == [0.0, 1.0, 0.0]
