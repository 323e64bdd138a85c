"""A group of samples is encoded as one line of the sample log within a byte limit, whatever its texts contain."""

import math

import pytest

from pipelinerl.observability.samples import (
    MOST_CHARACTERS,
    AnswerTokens,
    TokenTexts,
    decode,
    encode,
    shortened,
)
from tests.observability.samples.groups import HOSTILE, answer, group


def test_sample_group_is_unchanged_after_encoding_and_decoding():
    made = group(3, answer(parts=(("format", 0.5),), advantage=-0.25), answer(reward=None), tags=("a", "b"), why="w")
    line = encode(made, most_bytes=10_000)
    assert line is not None and line.endswith(b"\n") and line.count(b"\n") == 1
    assert decode(line[:-1]) == made


def test_shortened_sample_text_keeps_both_ends_and_states_the_number_of_omitted_characters():
    text = shortened("a" * 600_000 + "b" * 400_000, 1000)
    assert text.startswith("a" * 750 + " […999,000 characters left out…] ") and text.endswith("b" * 250)
    assert shortened("short", 5) == "short"


@pytest.mark.parametrize("most_bytes", [131072, 20_000, 3000])
def test_encoded_sample_group_never_exceeds_its_byte_limit(most_bytes):
    line = encode(group(1, *(answer("\x00" * 10**6, reason="r" * 10**5) for _ in range(8))), most_bytes=most_bytes)
    assert line is not None and len(line) <= most_bytes
    kept = decode(line[:-1])
    assert (
        kept is not None
        and len(kept.answers) == 8
        and all(len(each.text) < 2 * MOST_CHARACTERS for each in kept.answers)
    )


def test_sample_group_that_cannot_be_shortened_to_the_byte_limit_is_encoded_as_none():
    assert encode(group(1, *(answer() for _ in range(1000))), most_bytes=10_000) is None


def test_hostile_sample_text_is_unchanged_after_encoding_and_decoding_except_for_lone_surrogates():
    line = encode(group(1, answer(HOSTILE, reason=HOSTILE), domain=HOSTILE, tags=(HOSTILE,)), most_bytes=10_000)
    assert line is not None
    kept = decode(line[:-1])
    assert kept is not None and kept.answers[0].text == HOSTILE.replace("\ud800", "?")


@pytest.mark.parametrize("line", [b"", b"{", b"null", b"[1]", b'{"kind": "other"}', b"\xff\xfe", b"[" * 100_000])
def test_malformed_sample_line_decodes_to_none(line):
    assert decode(line) is None


def test_non_finite_reward_of_a_sample_is_stored_as_none():
    line = encode(group(1, answer(reward=math.nan)), most_bytes=10_000)
    assert line is not None and (kept := decode(line[:-1])) is not None and kept.answers[0].reward is None


def test_shortened_token_list_of_a_sample_keeps_its_first_and_last_tokens():
    count = 10_000
    tokens = AnswerTokens(
        tokens=TokenTexts(ids=tuple(range(count)), texts=("t",) * count),
        versions=(1,) * count,
        logprobs=(-0.5,) * count,
    )
    line = encode(group(1, answer(tokens=tokens), prompt_tokens=tokens.tokens), most_bytes=2**20)
    assert line is not None
    kept = decode(line)
    assert kept is not None and kept.answers[0].tokens is not None
    cut = kept.answers[0].tokens.tokens
    assert len(cut.ids) == len(cut.texts) == len(kept.answers[0].tokens.versions) == 2000
    assert (cut.at, cut.left_out, cut.ids[cut.at - 1], cut.ids[cut.at]) == (1500, 8000, 1499, 9500)
    assert kept.answers[0].tokens.deltas == () and kept.prompt_tokens == cut
    small = encode(group(1, answer(tokens=tokens)), most_bytes=600)
    assert small is not None and (held := decode(small)) is not None, "tokens are left out if they do not fit"
    assert held.answers[0].tokens is None or len(held.answers[0].tokens.tokens.ids) < 20
