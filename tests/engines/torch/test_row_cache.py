"""A prompt continues only from tokens that a row has, and never from all of its tokens.

Rows count as duplicates exactly while they hold the same tokens, by the recorded events.
"""

from __future__ import annotations

import numpy as np

from pipelinerl.engines.batching.model_runner import Prefill
from pipelinerl.engines.torch.row_cache import STEP, AlikeRows, RowBeginnings

ROWS = 8
COMMON = list(range(STEP * 2 + 3))


def test_one_of_several_prompts_with_a_shared_beginning_is_prefilled_first() -> None:
    beginnings = RowBeginnings(4)
    waiting = [Prefill([*COMMON, 200 + row], [row]) for row in range(3)]
    first = beginnings.next_of(waiting)
    assert (first.start, [each.rows for each in first.prefills], len(waiting)) == (0, [[0]], 2)
    beginnings.note([0], first.prefills[0].token_ids)
    rest = beginnings.next_of(waiting)
    assert (rest.start, rest.sources, len(rest.prefills), waiting) == (2 * STEP, [0, 0], 2, [])


def test_last_token_of_a_fully_cached_prompt_is_computed() -> None:
    beginnings = RowBeginnings(2)
    beginnings.note([1], COMMON[: 2 * STEP])
    assert beginnings.next_of([Prefill(COMMON[: 2 * STEP], [0])]).start == STEP


def test_found_beginnings_are_correct_after_random_events() -> None:
    """Fills, copies, moves and forgets rows at random, next to a plain record of their tokens."""
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


def test_too_few_duplicates_are_ignored() -> None:
    alike = AlikeRows(ROWS)
    alike.begin(range(2))
    assert alike.step(np.zeros(ROWS, np.int64), np.zeros(ROWS, np.int64)) is not None
    alike = AlikeRows(2 * ROWS)
    alike.begin(range(2))
    assert alike.step(np.zeros(2 * ROWS, np.int64), np.zeros(2 * ROWS, np.int64)) is None


def test_one_row_represents_its_duplicates() -> None:
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


def test_duplicates_are_correct_after_random_events() -> None:
    """Rows begin, step, end, move and replace others at random, next to a plain record of their tokens."""
    random = np.random.default_rng(0)
    alike, held, count = AlikeRows(ROWS), [()] * ROWS, 0
    merged = 0
    for _ in range(4000):
        kind = random.integers(0, 6)
        if kind == 0 and count < ROWS:
            rows = list(range(count, min(ROWS, count + int(random.integers(1, 5)))))
            alike.begin(rows)
            beginning = (f"prompt {random.integers(0, 3)}",)  # equal prompts that diverged may count as different
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
