"""Which rows a prompt goes on from: always tokens that this row has, never more than all but the last.

Rows count as alike exactly while they hold the same, as far as anybody was told.
"""

from __future__ import annotations

import numpy as np

from pipelinerl.engines.batching.model_runner import Prefill
from pipelinerl.engines.torch.row_cache import STEP, AlikeRows, RowBeginnings

ROWS = 8
COMMON = list(range(STEP * 2 + 3))


def test_one_goes_ahead_of_those_that_begin_alike() -> None:
    beginnings = RowBeginnings(4)
    waiting = [Prefill([*COMMON, 200 + row], [row]) for row in range(3)]
    first = beginnings.next_of(waiting)
    assert (first.start, [each.rows for each in first.prefills], len(waiting)) == (0, [[0]], 2)
    beginnings.note([0], first.prefills[0].token_ids)
    rest = beginnings.next_of(waiting)
    assert (rest.start, rest.sources, len(rest.prefills), waiting) == (2 * STEP, [0, 0], 2, [])


def test_of_a_prompt_that_a_row_has_whole_the_last_token_is_computed() -> None:
    beginnings = RowBeginnings(2)
    beginnings.note([1], COMMON[: 2 * STEP])
    assert beginnings.next_of([Prefill(COMMON[: 2 * STEP], [0])]).start == STEP


def test_whatever_happens_to_rows_what_is_found_is_there() -> None:
    """Rows are filled, copied, moved and forgotten at random, beside what they hold written down."""
    random = np.random.default_rng(0)
    beginnings, held = RowBeginnings(6), [[] for _ in range(6)]
    stems = [random.integers(0, 9, 3 * STEP).tolist() for _ in range(3)]
    for _ in range(400):
        kind = random.integers(0, 10)
        if kind == 0:
            beginnings.forget()
            held = [[] for _ in range(6)]
        elif kind < 4:
            (source, target), length = random.choice(6, 2, replace=False), int(random.integers(0, 4 * STEP))
            beginnings.copy([source], [target], length)
            held[target] = held[source][:length]
        else:
            stem = stems[random.integers(0, 3)][: random.integers(0, 3 * STEP)]
            waiting = [
                Prefill(stem + random.integers(0, 9, 4).tolist(), [int(row)]) for row in random.choice(6, 2, False)
            ]
            while waiting:
                found = beginnings.next_of(waiting)
                for source, prefill in zip(found.sources, found.prefills, strict=True):
                    assert found.start < len(prefill.token_ids)
                    assert held[source][: found.start] == prefill.token_ids[: found.start]
                for prefill in found.prefills:
                    beginnings.note(prefill.rows, prefill.token_ids)
                    held[prefill.rows[0]] = prefill.token_ids


def test_too_few_that_are_alike_are_none() -> None:
    alike = AlikeRows(ROWS)
    alike.begin(range(2))
    assert alike.step(np.zeros(ROWS, np.int64), np.zeros(ROWS, np.int64)) is not None
    alike = AlikeRows(2 * ROWS)
    alike.begin(range(2))
    assert alike.step(np.zeros(2 * ROWS, np.int64), np.zeros(2 * ROWS, np.int64)) is None


def test_one_stands_for_those_that_hold_the_same() -> None:
    alike = AlikeRows(ROWS)
    alike.begin([1, 3, 5])
    alike.begin([0, 2])
    feeds, positions = np.zeros(6, np.int64), np.zeros(6, np.int64)
    found = alike.step(feeds, positions)
    assert found is not None
    assert [found.first[of] for of in found.of_row] == [0, 1, 0, 1, 4, 1]
    feeds[3] = 7  # it sampled another token
    found = alike.step(feeds, positions + 1)
    assert found is not None
    assert [found.first[of] for of in found.of_row] == [0, 1, 0, 3, 4, 1]
    found = alike.step(np.zeros(6, np.int64), positions + 2)
    assert found is not None
    assert [found.first[of] for of in found.of_row] == [0, 1, 0, 3, 4, 1], "who has parted stays apart"


def test_whatever_happens_to_rows_those_that_are_alike_hold_the_same() -> None:
    """Rows begin, step, end, move and take their neighbours' places at random, beside what they hold written down."""
    random = np.random.default_rng(0)
    alike, held, count = AlikeRows(ROWS), [()] * ROWS, 0
    merged = 0
    for _ in range(4000):
        kind = random.integers(0, 6)
        if kind == 0 and count < ROWS:
            rows = list(range(count, min(ROWS, count + int(random.integers(1, 5)))))
            alike.begin(rows)
            beginning = (f"prompt {random.integers(0, 3)}",)  # equal prompts that came apart may count as different
            for row in rows:
                held[row] = beginning
            count += len(rows)
        elif kind == 1 and count > 1:
            row, count = int(random.integers(0, count - 1)), count - 1
            alike.move([count], [row])
            held[row] = held[count]
        elif count:
            feeds = random.integers(0, 2, count) if random.random() < 0.3 else np.zeros(count, np.int64)
            for row in range(count):
                held[row] = (*held[row], int(feeds[row]))
            found = alike.step(feeds, np.array([len(each) for each in held[:count]]))
            if found is not None:
                assert sorted(set(found.of_row)) == list(range(len(found.first)))
                assert all(held[row] == held[found.first[of]] for row, of in enumerate(found.of_row))
                assert all(found.of_row[row] == of for of, row in enumerate(found.first))
                merged += count - len(found.first)
    assert merged > 1000
