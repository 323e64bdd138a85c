"""The sample log: its records, the writer within its limits, queries, and the safe display of texts."""

import threading
import time
import unicodedata

import pytest

from pipelinerl.observability.samples import (
    LENGTH,
    MOST_CHARACTERS,
    AnswerTokens,
    Ranking,
    SampleKind,
    SampleLog,
    SampleQuery,
    SampleReader,
    TokenTexts,
    decode,
    encode,
    read_samples,
    visible,
)
from tests.observability.groups import answer, group
from tests.patience import PATIENCE_S, SOON_S


def test_sample_group_is_unchanged_after_encoding_and_decoding():
    made = group(3, answer(parts=(("format", 0.5),), advantage=-0.25), answer(reward=None), tags=("a", "b"), why="w")
    line = encode(made, most_bytes=10_000)
    assert line is not None and line.endswith(b"\n") and line.count(b"\n") == 1
    assert decode(line[:-1]) == made


@pytest.mark.parametrize("most_bytes", [131072, 20_000, 3000])
def test_encoded_sample_group_never_exceeds_its_byte_limit(most_bytes):
    line = encode(group(1, *(answer("\x00" * 10**6, reason="r" * 10**5) for _ in range(8))), most_bytes=most_bytes)
    assert line is not None and len(line) <= most_bytes
    kept = decode(line[:-1])
    assert kept is not None and len(kept.answers) == 8
    assert all(len(each.text) < 2 * MOST_CHARACTERS for each in kept.answers)


@pytest.mark.parametrize("line", [b"", b"{", b"null", b"[1]", b'{"kind": "other"}', b"\xff\xfe", b"[" * 100_000])
def test_malformed_sample_line_decodes_to_none(line):
    assert decode(line) is None


def test_shortened_token_list_of_a_sample_keeps_its_first_and_last_tokens():
    count = 10_000
    texts = TokenTexts(ids=tuple(range(count)), texts=("t",) * count)
    tokens = AnswerTokens(tokens=texts, versions=(1,) * count, logprobs=(-0.5,) * count)
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


MAX_BYTES = 64 * 1024


def written(path):
    return sum(file.stat().st_size for file in (path / "samples").glob("*"))


def log_in(path, *, max_bytes=MAX_BYTES):
    return SampleLog(path / "samples", "training", max_bytes=max_bytes)


def logged(path, *makes):
    """Return a closed log to which these functions, which make groups, were put."""
    log = log_in(path)
    for make in makes:
        log.put(make)
    log.close()
    return log


def test_sample_log_stays_within_its_size_limit_and_keeps_the_newest_samples(tmp_path):
    sizes, last = [], 0
    for life in range(3):  # three writers, one after another, each of which starts a new file
        log = log_in(tmp_path)

        def make(step):
            sizes.append(written(tmp_path))
            return [group(step, answer("x" * 1500), answer("y" * 500))]

        for step in range(last + 1, last + 101):
            log.put(lambda step=step: make(step))
        log.close()
        last = 100 * (life + 1)
    assert log.left_out == 0
    assert max(*sizes, written(tmp_path)) <= MAX_BYTES and written(tmp_path) > MAX_BYTES // 2
    steps = [each.step for each in read_samples(tmp_path)]
    assert steps == list(range(301 - len(steps), 301)), "the newest samples are kept, without a gap"


def test_oversized_sample_group_is_dropped_and_the_next_group_is_kept_for_its_owner_only(tmp_path):
    log = logged(tmp_path, lambda: [group(1, *(answer() for _ in range(500))), group(2)])
    assert [each.step for each in read_samples(tmp_path)] == [2] and log.left_out == 1
    assert [file.stat().st_mode & 0o777 for file in (tmp_path / "samples").glob("*")] == [0o600]


def test_putting_a_sample_into_the_log_does_not_wait_for_a_slow_writer(tmp_path):
    log, gate = log_in(tmp_path, max_bytes=2**22), threading.Event()

    def slow():
        assert gate.wait(PATIENCE_S)
        return []

    began = time.monotonic()
    log.put(slow)
    for step in range(1000):
        log.put(lambda step=step: [group(step)])
    assert time.monotonic() - began < SOON_S
    gate.set()
    log.close()
    assert 0 < log.left_out < 1000 and log.left_out + len(read_samples(tmp_path)) == 1000


def test_incomplete_last_line_of_the_sample_log_is_skipped_by_readers_and_not_continued_by_writers(tmp_path):
    logged(tmp_path, lambda: [group(1)])
    (torn,) = (tmp_path / "samples").glob("*")
    with torn.open("ab") as file:
        file.write(b'{"kind":"trained","st')
    logged(tmp_path, lambda: [group(2)])
    assert [each.step for each in read_samples(tmp_path)] == [1, 2]


def test_samples_are_dropped_without_an_error_if_their_directory_is_unusable(tmp_path):
    (tmp_path / "samples").write_text("in the way")
    assert logged(tmp_path, lambda: [group(1)], lambda: [group(2)]).left_out == 2


def test_sample_whose_construction_raises_is_dropped_and_later_samples_are_kept(tmp_path, caplog):
    def make():
        raise RuntimeError("the tokenizer is borrowed")

    log = logged(tmp_path, make, lambda: [group(2)])
    assert log.left_out == 1 and [each.step for each in read_samples(tmp_path)] == [2]
    assert "RuntimeError: the tokenizer is borrowed" in caplog.text


GROUPS = [
    group(1, answer("a", reward=1.0), answer("b", reward=0.0, finish_reason="length")),
    group(2, answer("c", reward=0.5), answer("d", reward=None), domain="sums", tags=("hard",)),
    group(2, answer("e", reward=0.0), kind=SampleKind.FILTERED, why="no signal"),
    group(2, answer("f", reward=-1.0), kind=SampleKind.EVALUATION, evaluation="math"),
    group(2, answer("g", reward=-1.0), kind=SampleKind.EVALUATION, evaluation="aime"),
]


def line(made):
    encoded = encode(made, most_bytes=10_000)
    assert encoded is not None
    return encoded


@pytest.mark.parametrize(
    ("wanted", "texts"),
    [
        ({}, "abcd"),
        ({"limit": 3}, "bcd"),
        ({"limit": 99}, "abcd"),
        ({"step": 2}, "cd"),
        ({"domain": "words"}, "ab"),
        ({"tag": "hard"}, "cd"),
        ({"tag": "soft"}, ""),
        ({"finish_reason": LENGTH}, "b"),
        ({"ranking": Ranking.WORST}, "bca"),
        ({"ranking": Ranking.BEST, "limit": 2}, "ac"),
        ({"kinds": frozenset((SampleKind.FILTERED,))}, "e"),
        ({"kinds": frozenset((SampleKind.FILTERED, SampleKind.EVALUATION))}, "efg"),
        ({"kinds": frozenset((SampleKind.EVALUATION,)), "evaluation": "aime"}, "g"),
    ],
)
def test_sample_query_returns_matching_samples(wanted, texts):
    assert "".join(each.answer.text for each in SampleQuery(**wanted).choose(GROUPS)) == texts


def test_sample_reader_continues_where_it_stopped_and_reads_only_complete_lines(tmp_path):
    (tmp_path / "samples").mkdir()
    path, reader = tmp_path / "samples" / "training-000001.jsonl", SampleReader(tmp_path)
    assert reader.new() == []
    whole = line(GROUPS[0]) + line(GROUPS[1])
    path.write_bytes(whole[:-10])
    assert reader.new() == GROUPS[:1]
    path.write_bytes(whole)
    (tmp_path / "samples" / "evaluation-000001.jsonl").write_bytes(line(GROUPS[3]))
    assert sorted(each.kind for each in reader.new()) == ["evaluation", "trained"]
    assert reader.new() == []


def test_samples_of_a_repeated_step_replace_earlier_ones(tmp_path):
    (tmp_path / "samples").mkdir()
    again = group(1, answer("again"), time=9.0)
    (tmp_path / "samples" / "training-000001.jsonl").write_bytes(line(GROUPS[0]) + b"torn {\n" + line(again))
    assert read_samples(tmp_path) == [again]


def test_control_characters_and_no_others_are_escaped_in_shown_text():
    for text in ("plain", "two\nlines\tand a tab", "žluťoučký kůň", "漢字", "שלום", "x² ≤ ½ → ∞", "🙂"):
        assert visible(text) == text
    everything = "".join(map(chr, range(0x110000)))
    kept = set(visible(everything)) - {"\n", "\t"}
    assert not [hex(ord(c)) for c in kept if unicodedata.category(c)[0] == "C" or unicodedata.bidirectional(c) in
                ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")]  # fmt: skip
