"""The KL controller: its update rule, its convergence to the target, and the setting whose coefficient it changes."""

import numpy as np
import pytest

from pipelinerl.objective.kl_control import KLController, as_column, kl_coefficient, with_kl_coefficient
from pipelinerl.objective.presets import resolve


def test_coefficients_of_the_kl_controller_match_hand_computed_numbers():
    controller = KLController(target=2.0, gain=0.5)
    assert controller.next(0.1, 2.2) == pytest.approx(0.1 * (1 + 0.5 * 0.1))
    assert controller.next(0.1, 2.0) == 0.1
    assert controller.next(0.1, 200.0) == pytest.approx(0.11), "the error is at most 0.2"
    assert controller.next(0.1, -3.0) == pytest.approx(0.09), "and at least −0.2, also where K1 is negative"


def test_kl_coefficient_settles_where_the_kl_equals_the_target():
    """At the KL coefficient β, the simulated policy has a KL divergence of 1/β."""
    controller, beta = KLController(target=4.0), 10.0
    for _ in range(2000):
        beta = controller.next(beta, 1.0 / beta)
    assert 1.0 / beta == pytest.approx(4.0, rel=1e-3)


def test_kl_coefficient_can_be_read_and_replaced_in_the_loss_penalty_or_in_the_reward_cost():
    penalised, costed = resolve("grpo_kl"), resolve({"preset": "ppo", "adv": {"kl": 0.2}})
    assert (kl_coefficient(penalised), kl_coefficient(costed), kl_coefficient(resolve("grpo"))) == (0.04, 0.2, None)
    for objective in (penalised, costed):
        changed = with_kl_coefficient(objective, 0.3)
        assert kl_coefficient(changed) == 0.3
        assert with_kl_coefficient(changed, kl_coefficient(objective)) == objective
        assert changed.passes == objective.passes
    assert kl_coefficient(resolve("prime_rl")) is None, "its penalty measures the distance to the sampler"
    assert as_column(resolve("prime_rl")) == (resolve("prime_rl"), None)
    with pytest.raises(ValueError, match=r"without: set grad2 to kind 'kl', or adv\.kl"):
        with_kl_coefficient(resolve("grpo"), 0.3)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("beta", [0.04, 0.3])
def test_loss_and_gradient_are_equal_for_a_kl_coefficient_as_a_batch_column_and_as_a_constant(
    estimator, beta, columns_of
):
    objective = resolve({"preset": "grpo", "grad2": {"kind": "kl", "beta": beta, "estimator": estimator}})
    logprobs, columns = columns_of(3)
    compiled, coefficient = as_column(objective)
    given = columns | {"kl_coefficients": np.full(logprobs.shape, coefficient)}
    np.testing.assert_allclose(compiled.evaluate(logprobs, given), objective.evaluate(logprobs, columns), rtol=1e-12)
    np.testing.assert_allclose(
        compiled.prediction_gradient(logprobs, given), objective.prediction_gradient(logprobs, columns), rtol=1e-12
    )
    assert compiled == as_column(with_kl_coefficient(objective, 0.1))[0]
    assert hash(compiled) == hash(as_column(with_kl_coefficient(objective, 0.1))[0])


def test_coefficient_of_the_kl_cost_in_rewards_is_not_passed_to_the_loss_as_a_column():
    costed = resolve({"preset": "ppo", "adv": {"kl": 0.2}})
    compiled, coefficient = as_column(costed)
    assert coefficient is None and compiled == as_column(with_kl_coefficient(costed, 0.7))[0]
    assert as_column(resolve("grpo")) == (resolve("grpo"), None)
