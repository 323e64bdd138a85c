"""The sample log can be queried and read while its files grow and after a kill has left an incomplete line."""

import pytest

from pipelinerl.observability.samples import (
    LENGTH,
    Ranking,
    SampleKind,
    SampleQuery,
    SampleReader,
    encode,
    read_samples,
)
from tests.observability.samples.groups import answer, group

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
