"""Tests that batch rows with equal tokens (duplicates) are computed once until their tokens differ."""

import numpy as np

from pipelinerl.engines.torch.blocks import AlikeRows

ROWS = 8


def test_batch_rows_with_equal_tokens_are_computed_separately_if_merging_would_save_too_few_rows():
    alike = AlikeRows(ROWS)
    alike.begin(range(2))
    assert alike.step(np.zeros(ROWS, np.int64), np.zeros(ROWS, np.int64)) is not None
    alike = AlikeRows(2 * ROWS)
    alike.begin(range(2))
    assert alike.step(np.zeros(2 * ROWS, np.int64), np.zeros(2 * ROWS, np.int64)) is None


def test_batch_rows_with_equal_tokens_are_computed_as_one_row_until_their_tokens_differ():
    alike = AlikeRows(ROWS)
    alike.begin([1, 3, 5])
    alike.begin([0, 2])
    feeds, positions = np.zeros(6, np.int64), np.zeros(6, np.int64)
    computed = alike.step(feeds, positions)
    assert computed is not None
    assert [computed.first[of] for of in computed.of_row] == [0, 1, 0, 1, 4, 1]
    feeds[3] = 7  # row 3 sampled another token than row 1, its duplicate
    computed = alike.step(feeds, positions + 1)
    assert computed is not None
    assert [computed.first[of] for of in computed.of_row] == [0, 1, 0, 3, 4, 1]
    computed = alike.step(np.zeros(6, np.int64), positions + 2)
    assert computed is not None
    assert [computed.first[of] for of in computed.of_row] == [0, 1, 0, 3, 4, 1], "who has parted stays apart"


def test_batch_rows_computed_as_one_row_have_equal_tokens_after_any_sequence_of_events():
    """Rows begin, step, end and move at random; the test keeps the tokens of each row to check the duplicates."""
    random = np.random.default_rng(0)
    alike, held, count = AlikeRows(ROWS), [()] * ROWS, 0
    merged = 0
    for _ in range(4000):
        kind = random.integers(0, 6)
        if kind == 0 and count < ROWS:
            rows = list(range(count, min(ROWS, count + int(random.integers(1, 5)))))
            alike.begin(rows)
            # Rows that begin separately may count as different even if their prompts are equal.
            beginning = (f"prompt {random.integers(0, 3)}",)
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
            computed = alike.step(feeds, np.array([len(each) for each in held[:count]]))
            if computed is not None:
                assert sorted(set(computed.of_row)) == list(range(len(computed.first)))
                assert all(held[row] == held[computed.first[of]] for row, of in enumerate(computed.of_row))
                assert all(computed.of_row[row] == of for of, row in enumerate(computed.first))
                merged += count - len(computed.first)
    assert merged > 1000
