"""The KL controller: its rule by hand, that it settles at its target, and where it puts the coefficient."""

import pytest

from pipelinerl.objective.kl_control import KLController, kl_coefficient, with_kl_coefficient
from pipelinerl.objective.presets import resolve


def test_the_rule_by_hand():
    controller = KLController(target=2.0, gain=0.5)
    assert controller.next(0.1, 2.2) == pytest.approx(0.1 * (1 + 0.5 * 0.1))
    assert controller.next(0.1, 2.0) == 0.1
    assert controller.next(0.1, 200.0) == pytest.approx(0.11), "the error is at most 0.2"
    assert controller.next(0.1, -3.0) == pytest.approx(0.09), "and at least −0.2, also where K1 is negative"


def test_it_settles_where_the_policy_answers_to_it():
    """A policy whose KL is 1/β is held at the target."""
    controller, beta = KLController(target=4.0), 10.0
    for _ in range(2000):
        beta = controller.next(beta, 1.0 / beta)
    assert 1.0 / beta == pytest.approx(4.0, rel=1e-3)


def test_the_coefficient_is_set_where_it_is_read():
    penalised, costed = resolve("grpo_kl"), resolve({"preset": "ppo", "adv": {"kl": 0.2}})
    assert (kl_coefficient(penalised), kl_coefficient(costed), kl_coefficient(resolve("grpo"))) == (0.04, 0.2, None)
    for objective in (penalised, costed):
        changed = with_kl_coefficient(objective, 0.3)
        assert kl_coefficient(changed) == 0.3
        assert with_kl_coefficient(changed, kl_coefficient(objective)) == objective
        assert changed.passes == objective.passes
    with pytest.raises(ValueError, match=r"without: set grad2 to kind 'kl', or adv\.kl"):
        with_kl_coefficient(resolve("grpo"), 0.3)
