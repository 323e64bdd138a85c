"""Tests of the block table of the paged KV cache: rows share the blocks of common prefixes, and no block leaks."""

import numpy as np
import pytest

from pipelinerl.engines.torch.blocks import BlockTable, tokens_of

SIZE, ROWS, CONTEXT = 4, 4, 16
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


def test_paged_cache_holds_four_times_as_many_heavy_tailed_sequences_as_full_length_rows_would():
    """Sequence lengths are those of `python -m benchmarks engine`. A full row has the whole context length."""
    random, rows, context, size = np.random.default_rng(0), 8, 320, 32
    blocks = BlockTable(rows=100, context=context, blocks=rows * context // size, size=size, keeps_few=False)
    held = 0
    while True:
        length = 16 + min(256, int(8 * (1 + random.pareto(1.0))))
        if blocks.free < -(-length // size):
            break
        blocks.begin([held], random.integers(0, 9, length).astype(np.int32))
        held += 1
    assert held >= 4 * rows


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
