"""`explain` splits each token's gradient into factors; they equal hand-computed numbers and the training gradient."""

from dataclasses import replace

import numpy as np
import pytest

from pipelinerl.objective.catalogue import PRESETS
from pipelinerl.objective.losses import ScoredRollout, policy_loss
from pipelinerl.objective.presets import resolve, slot_lines
from pipelinerl.plugins.replay.token_factors import factors
from tests.objective.test_losses import GROUPS, MASK, REWARDS, batch, rollouts

GOOD = ScoredRollout(
    tokens=("so", "4"),
    reward=1.0,
    behavior_logprobs=(-1.0, -0.7),
    logprobs=(-1.0, -0.3),
    old_logprobs=(-1.0, -0.6),
    ref_logprobs=(-1.2, -0.9),
    values=(0.3, 0.4),
)
BAD = ScoredRollout(
    tokens=("5",),
    reward=0.0,
    behavior_logprobs=(-1.7,),
    logprobs=(-1.6,),
    old_logprobs=(-0.7,),
    ref_logprobs=(-1.0,),
    values=(0.1,),
)


def test_explain_reports_truncated_importance_weights_at_their_cap():
    *_, third = factors(resolve("ppo_tis"), [GOOD, BAD])
    assert (third.is_weight, third.truncated) == (2.0, True), "π_old/μ = e > 2"


def test_explain_reports_factors_of_0_for_a_rollout_that_could_not_be_judged():
    *judged, last = factors(resolve("grpo"), [GOOD, BAD, replace(BAD, judged=False, reward=9.0)])
    assert (last.agg, last.adv, last.multiplier) == (0.0, 0.0, 0.0)
    assert judged == factors(resolve("grpo"), [GOOD, BAD])


@pytest.mark.parametrize("name", PRESETS)
def test_explain_reports_the_gradient_of_a_score_function_objective_as_the_product_of_its_factors(name):
    objective = resolve(name, max_tokens=256)
    rows = factors(objective, [GOOD, BAD])
    assert len(rows) == 3
    if slot_lines(objective)[3].kind == "logprob" and slot_lines(objective)[4].kind == "none":
        for row in rows:
            assert row.multiplier == pytest.approx(row.agg * row.is_weight * row.adv)


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"gfpo"}))
def test_gradient_from_policy_loss_is_the_negative_of_the_gradient_that_explain_reports(name):
    table = batch()
    logprobs = table.pop("logprobs")
    result = policy_loss(name, logprobs, rewards=REWARDS, groups=GROUPS, mask=MASK, max_tokens=8, **table)
    wanted = [-row.multiplier for row in factors(resolve(name, max_tokens=8), rollouts())]
    np.testing.assert_allclose(result.gradient[MASK], wanted, atol=1e-15)
    assert (result.gradient[~MASK] == 0).all() and (result.advantages[~MASK] == 0).all() and np.isfinite(result.loss)
