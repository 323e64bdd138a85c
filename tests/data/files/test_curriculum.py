"""The curriculum presents each problem once, from easy to hard, shuffled within a moving band of difficulty.

Its order depends only on the seed and the data.
"""

import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelinerl.data.files.source import Curriculum, ProblemOrder, RowSource
from pipelinerl.data.problems import open_source
from pipelinerl.data.source import Split
from pipelinerl.errors import RecipeError

ROWS = [
    {"prompt": f"What is {i}?", "answer": str(i), "metadata": {"pass_rate": round(i * 7 % 101 / 100, 2)}}
    for i in range(101)
]


def written(folder, suffix=".jsonl", rows=ROWS):
    path = folder / f"rated{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(path, of=Split.TRAIN, seed=0, **parameters):
    source = open_source("files", domain="d", split=of, seed=seed, parameters={"path": str(path), **parameters})
    assert isinstance(source, RowSource)
    return source


def rates(source, first, count):
    return [source.problem(index).metadata["pass_rate"] for index in range(first, first + count)]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(("order", "sign"), [("easy_first", -1), ("hard_first", 1)])
def test_curriculum_with_band_width_zero_sorts_the_first_epoch_by_difficulty_and_shuffles_later_epochs(
    tmp_path, order, sign, suffix
):
    source = opened(written(tmp_path, suffix), order=order, order_band=0)
    sweep, epoch = rates(source, 0, len(source)), rates(source, len(source), len(source))
    assert sweep == sorted(sweep, key=lambda rate: sign * rate)
    assert Counter(sweep) == Counter(epoch) and epoch != sweep
    plain = opened(written(tmp_path, suffix))
    assert epoch == rates(plain, 0, len(plain)), "later epochs must be those of a run without a curriculum"


def test_curriculum_band_moves_from_easy_to_hard_and_covers_every_problem():
    known = np.random.default_rng(0).random(1000)
    place_of = np.argsort(np.argsort(-known)) / 1000
    for band, over in ((0.1, 1000), (0.3, 2500), (0.2, 400)):
        sweep = Curriculum(order=ProblemOrder.EASY_FIRST, band=band, over=over).sweep(known, seed=3)
        through = (np.arange(over) + 0.5) / over
        assert np.abs(place_of[sweep] - through).max() <= band + 0.02
        assert np.std(place_of[sweep] - through) > 0.2 * band, "problems within the band must be shuffled"
        counts = Counter(sweep.tolist())
        assert set(counts.values()) <= {over // 1000, over // 1000 + 1} and sum(counts.values()) == over


def test_curriculum_order_depends_on_the_seed_and_shuffles_equally_difficult_problems(tmp_path):
    path = written(tmp_path)
    first, again, other = (opened(path, seed=seed, order="easy_first") for seed in (1, 1, 2))
    ids = [[source.problem(index).problem_id for index in range(3 * len(first))] for source in (first, again, other)]
    assert ids[0] == ids[1] != ids[2]
    alike = np.full(50, 0.5)
    sweep = Curriculum(order=ProblemOrder.EASY_FIRST, band=0.0).sweep(alike, seed=1)
    assert sorted(sweep.tolist()) == list(range(50)) != sweep.tolist()


def test_held_out_split_ignores_the_curriculum_and_needs_no_pass_rates(tmp_path):
    path = written(tmp_path)
    with_it, without = opened(path, Split.HELD_OUT, order="easy_first"), opened(path, Split.HELD_OUT)
    problems = [[source.problem(index) for index in range(len(source))] for source in (with_it, without)]
    assert problems[0] == problems[1]


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"order": "easiest"}, "domains.d.parameters.order must be one of shuffled, easy_first, hard_first, got 'easi"),
        ({"order_band": 0.1}, "order_band and order_over need an order, such as easy_first"),
        ({"order": "easy_first", "order_band": 2}, "order_band must be a share from 0 to 1, got 2"),
        ({"order": "easy_first", "order_over": 0.5}, "order_over must be a number of problems, got 0.5"),
        ({"order": "easy_first", "rate_field": "answer"}, r"rated.jsonl line 1: field 'answer' must be a pass rate"),
    ],
)
def test_invalid_curriculum_parameters_are_rejected(tmp_path, parameters, sentence):
    with pytest.raises(RecipeError, match=sentence):
        opened(written(tmp_path), **parameters)
