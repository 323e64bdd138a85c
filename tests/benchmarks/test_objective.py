"""All variants that the objective benchmark compares compute the same gradient."""

import torch

from benchmarks.objective import PROMPT, SAMPLED, arms, micro_batch


def test_compared_variants_of_the_objective_benchmark_have_equal_gradients():
    works = arms(4 * (PROMPT + SAMPLED))
    gradient = works["slots"]()
    torch.testing.assert_close(works["minimum"](), gradient, rtol=1e-5, atol=1e-9)
    _, columns = micro_batch(4 * (PROMPT + SAMPLED))
    inside = columns["loss_mask"]
    assert (gradient[~inside] == 0).all()
    clipped = (gradient[inside] == 0).float().mean()
    assert 0.02 < clipped < 0.5, "some tokens are clipped, most are not"
