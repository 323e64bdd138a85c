"""Dithered rounding of weights to bfloat16: unbiased, determined by the parameter's name, equal in numpy and torch."""

import numpy as np
import pytest
import torch

from pipelinerl.numerics import dither, dither_torch
from pipelinerl.numerics.dither_torch import UpdateProbe
from trainer_contract.types import Rounding

WEIGHTS = 0.05 * torch.randn(3, 500_003, generator=torch.Generator().manual_seed(0))
ON_THE_GRID = WEIGHTS.bfloat16().float()


def share(rounding, update):
    weights = {"w": ON_THE_GRID.clone()}
    probe = UpdateProbe.of(weights, torch.bfloat16, rounding)
    assert probe is not None
    before = probe.read()
    weights["w"] += update
    return probe.share(before, probe.read())


def test_dithered_rounding_is_identical_in_numpy_and_torch():
    ours = dither_torch.dithered(WEIGHTS, name="w").view(torch.int16).numpy()
    assert np.array_equal(ours, dither.dithered(WEIGHTS.numpy(), name="w").view(np.int16))


def test_dithered_rounding_of_a_shards_rows_equals_that_of_the_same_rows_in_the_whole_parameter():
    whole = dither_torch.dithered(WEIGHTS, name="w")
    assert torch.equal(dither_torch.dithered(WEIGHTS[1:], name="w", first=500_003), whole[1:])


def test_dithered_rounding_leaves_infinities_and_weights_representable_in_bfloat16_unchanged():
    assert torch.equal(dither_torch.dithered(ON_THE_GRID, name="w").float(), ON_THE_GRID)
    ends = torch.tensor([float("inf"), float("-inf"), 0.0])
    assert torch.equal(dither_torch.dithered(ends, name="w").float(), ends)


@pytest.mark.parametrize("size", [2e-5, 1e-6])
def test_small_updates_survive_dithered_rounding_on_average_and_are_lost_by_rounding_to_nearest(size):
    update = size * torch.sign(torch.randn(WEIGHTS.shape, generator=torch.Generator().manual_seed(1)))
    fair, nearest = dither_torch.dithered(ON_THE_GRID + update, name="w"), (ON_THE_GRID + update).bfloat16()
    seen = [float(((each.float() - ON_THE_GRID) * update).sum() / (update * update).sum()) for each in (fair, nearest)]
    assert seen[0] == pytest.approx(1.0, abs=0.1) and seen[1] < 0.3


def test_measured_share_of_an_update_that_survives_rounding_is_small_without_dither_and_1_with_dither():
    update = 2e-5 * torch.ones_like(WEIGHTS)
    assert share(Rounding.NEAREST, update) == pytest.approx(0.1, abs=0.15)
    assert share(Rounding.DITHERED, update) == pytest.approx(1.0, abs=0.35)
    assert share(Rounding.DITHERED, torch.zeros_like(WEIGHTS)) is None
    assert UpdateProbe.of({"w": WEIGHTS}, torch.float32, Rounding.DITHERED) is None
