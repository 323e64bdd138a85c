"""The numbers of rows for which CUDA graphs are captured; `test_runner` compares their results on a GPU."""

import pytest

from pipelinerl.engines.torch.decode_graphs import padded_rows


def test_number_of_decoded_rows_is_rounded_up_to_one_of_a_few_cuda_graph_sizes():
    padded = [padded_rows(count, 256) for count in range(1, 257)]
    assert all(rows >= count for count, rows in enumerate(padded, start=1))
    assert sorted(set(padded)) == [2, 4, 8, 16, 32, *range(64, 257, 32)]


@pytest.mark.parametrize(("count", "most", "rows"), [(1, 1, 1), (33, 48, 48), (5, 6, 6)])
def test_cuda_graph_sizes_never_exceed_the_number_of_slots(count, most, rows):
    assert padded_rows(count, most) == rows
