"""Rows share the cache blocks of common prefixes, no block leaks, and rows with equal tokens are computed once."""

import numpy as np
import pytest

from pipelinerl.engines.torch.blocks import AlikeRows, BlockTable, tokens_of

SIZE, ROWS, CONTEXT = 4, 4, 16
#: Rows of the batches in which equal rows are merged.
WIDE = 8
COMMON = list(range(2 * SIZE + 3))


def table(blocks=ROWS * CONTEXT // SIZE, *, keeps_few=False):
    return BlockTable(rows=ROWS, context=CONTEXT, blocks=blocks, size=SIZE, keeps_few=keeps_few)


def test_sequences_with_the_same_prompt_share_its_full_cache_blocks():
    blocks = table()
    assert blocks.begin([0, 1, 2], tokens_of(COMMON)) == 0
    assert blocks.in_use == 2 + 3, "two shared blocks, and the last one of each row"
    assert (blocks.table[:3, :2] == blocks.table[0, :2]).all() and len(set(blocks.table[:3, 2])) == 3


def test_prompt_reuses_full_cache_blocks_of_an_ended_sequence_including_its_sampled_tokens():
    blocks = table()
    blocks.begin([0], tokens_of(COMMON[:6]))
    for position, token in enumerate(COMMON[6:], start=6):
        assert blocks.grow(np.array([position]))
        blocks.tokens[0, position] = token
    blocks.release(0, len(COMMON))
    assert blocks.in_use == 0
    assert blocks.begin([1], tokens_of([*COMMON, 99])) == 2 * SIZE
    assert blocks.reused_tokens == 2 * SIZE


def test_cache_blocks_computed_by_older_weights_are_not_reused():
    blocks = table()
    blocks.begin([0], tokens_of(COMMON))
    blocks.forget()
    assert blocks.begin([1], tokens_of(COMMON)) == 0
    blocks.release(0, len(COMMON))
    blocks.release(1, len(COMMON))
    assert blocks.begin([2], tokens_of(COMMON)) == 2 * SIZE, "row 1 was computed by the new weights"


def test_least_recently_used_prefix_is_evicted_first():
    blocks, other = table(6), [100 + token for token in COMMON]
    for prompt in (COMMON, other, COMMON):
        blocks.begin([0], tokens_of(prompt))
        blocks.release(0, len(prompt))
    blocks.begin([1], tokens_of([200 + token for token in range(CONTEXT - 1)]))
    assert len(blocks.find(tokens_of(COMMON))) == 2 and not blocks.find(tokens_of(other))


def test_request_for_more_cache_blocks_than_are_free_returns_false_instead_of_raising():
    blocks = table(5)
    blocks.begin([0], tokens_of(COMMON[:7]))
    blocks.begin([1], tokens_of([50, 51, 52, 53, 54, 55, 56]))
    assert blocks.grow(np.array([8, 7])) and not blocks.grow(np.array([8, 8]))
    blocks.release(1, 8)
    assert blocks.grow(np.array([8]))


@pytest.mark.parametrize("keeps_few", [False, True])
def test_block_table_agrees_with_a_simple_reference_after_random_operations(keeps_few):
    """Each block of a row, shared or not, holds the tokens of that row in order, and no row has a free block."""
    random = np.random.default_rng(0)
    blocks, stored = table(14, keeps_few=keeps_few), np.full((14, SIZE), -1)
    rows = {}
    stems = [random.integers(0, 9, 3 * SIZE).tolist() for _ in range(3)]

    def write(row, start):
        for position in range(start, len(rows[row])):
            stored[blocks.table[row, position // SIZE], position % SIZE] = rows[row][position]

    for _ in range(1500):
        kind, row = random.integers(0, 12), int(random.integers(0, ROWS))
        if kind == 0:
            blocks.forget()
        elif row not in rows:
            prompt = stems[random.integers(0, 3)][: random.integers(0, 3 * SIZE)] + random.integers(0, 9, 2).tolist()
            if blocks.free >= -(-len(prompt) // SIZE):
                start = blocks.begin([row], tokens_of(prompt))
                rows[row] = prompt
                write(row, start)
        elif kind < 3 or len(rows[row]) >= CONTEXT - 1:
            blocks.release(row, len(rows.pop(row)))
        elif kind == 3 and (copies := blocks.gather()) is not None:
            stored[copies.targets] = stored[copies.sources]
        elif kind == 4 and (target := next((each for each in range(ROWS) if each not in rows), None)) is not None:
            blocks.move(row, target)
            rows[target] = rows.pop(row)
        elif blocks.grow(_positions(rows)):
            rows[row] = [*rows[row], int(random.integers(0, 9))]
            blocks.tokens[row, len(rows[row]) - 1] = rows[row][-1]
            write(row, len(rows[row]) - 1)
        for each, tokens in rows.items():
            places = np.arange(len(tokens))
            assert stored[blocks.table[each, places // SIZE], places % SIZE].tolist() == tokens
        assert blocks.in_use + blocks.free == blocks.num_blocks


def _positions(rows):
    return np.array([len(rows.get(row, [])) if row in rows else -1 for row in range(ROWS)])


def test_blocks_in_doubt_are_cleared_only_if_no_other_row_reads_them():
    blocks = table()
    blocks.begin([0, 1], tokens_of(COMMON))
    blocks.begin([2], tokens_of([*COMMON[: 2 * SIZE], 99]))
    assert blocks.spoil([0, 1]) == sorted(blocks.table[:2, 2].tolist()), "row 2 reads the two blocks of the prefix"
    assert not blocks.find(tokens_of(COMMON))
    for row in (0, 1):
        blocks.release(row, len(COMMON))
    assert not blocks.find(tokens_of(COMMON)), "blocks in doubt are not indexed again"
    assert blocks.spoil([2]) == sorted(blocks.table[2, :3].tolist())


def test_batch_rows_with_equal_tokens_are_computed_separately_if_merging_would_save_too_few_rows():
    alike = AlikeRows(WIDE)
    alike.begin(range(2))
    assert alike.step(np.zeros(WIDE, np.int64), np.zeros(WIDE, np.int64)) is not None
    alike = AlikeRows(2 * WIDE)
    alike.begin(range(2))
    assert alike.step(np.zeros(2 * WIDE, np.int64), np.zeros(2 * WIDE, np.int64)) is None


def test_batch_rows_computed_as_one_row_have_equal_tokens_after_any_sequence_of_events():
    """Rows begin, step, end and move at random; the test keeps the tokens of each row to check the duplicates."""
    random = np.random.default_rng(0)
    alike, held, count = AlikeRows(WIDE), [()] * WIDE, 0
    merged = 0
    for _ in range(4000):
        kind = random.integers(0, 6)
        if kind == 0 and count < WIDE:
            rows = list(range(count, min(WIDE, count + int(random.integers(1, 5)))))
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
