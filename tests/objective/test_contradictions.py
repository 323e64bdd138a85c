"""Settings of an objective that have no effect in a given run are reported in a sentence; other settings are not."""

from dataclasses import replace

import pytest

from pipelinerl.objective.catalogue import PRESETS
from pipelinerl.objective.contradictions import Setting, doubts
from pipelinerl.objective.presets import resolve
from pipelinerl.objective.tokens import Policy

PLAIN = Setting(group_sizes={"sampling.group_size": 16}, max_tokens=8)
RECOMPUTED = Setting(group_sizes={"sampling.group_size": 16}, max_tokens=8, step_begins_at=frozenset({Policy.OLD}))


@pytest.mark.parametrize(
    ("table", "size", "sentence"),
    [
        ({"preset": "gfpo"}, 8, "adv.keep (8) must be below sampling.group_size (8)"),
        ({"preset": "gfpo"}, 1, "adv.keep (8) must be below sampling.group_size (1)"),
        ({"preset": "grpo"}, 1, "adv.baseline mean needs groups, and sampling.group_size is 1"),
        ({"preset": "clip_cov"}, 1, "adv covariance_clipped needs groups"),
        ({"preset": "rloo"}, 1, "adv.baseline leave_one_out needs groups"),
        ({"preset": "reinforce_plus_plus"}, 1, "adv.baseline mean needs groups"),
        ({"preset": "grpo", "adv": {"baseline": "none"}}, 1, "adv.scale std needs groups"),
        ({"preset": "maxrl", "adv": {"baseline": "none"}}, 1, "adv.scale mean needs groups"),
    ],
)
def test_objective_setting_that_has_no_effect_in_this_run_is_reported(table, size, sentence):
    objective = resolve(table)
    (reported,) = objective.adv.without_effect("sampling.group_size", size)
    assert reported.startswith(sentence)
    assert list(objective.adv.without_effect("sampling.group_size", 16)) == []


@pytest.mark.parametrize(
    "table",
    [
        {"preset": "decoupled_ppo"},
        {"preset": "rae"},
        {"preset": "grpo", "adv": {"baseline": "none", "scale": "none"}},
        {"preset": "grpo", "adv": {"baseline": "none", "scale": "batch"}},
    ],
)
def test_objectives_that_need_no_group_report_no_ineffective_setting_at_a_group_size_of_1(table):
    assert list(resolve(table).adv.without_effect("sampling.group_size", 1)) == []


@pytest.mark.parametrize(
    ("table", "setting", "sentence"),
    [
        ({"preset": "prime_rl", "grad2": {"to": "old"}}, RECOMPUTED, "grad2 penalises the KL to π_old, from which"),
        ({"preset": "ppo_tis"}, RECOMPUTED, "grad1 clips π_θ/π_old, which is always 1 here"),
        ({"preset": "decoupled_ppo"}, RECOMPUTED, "grad1 clips π_θ/π_old, which is always 1 here"),
        (
            {"preset": "pipelinerl", "is_weight": {"denominator": "old"}},
            RECOMPUTED,
            "is_weight divides by the policy that the step starts from",
        ),
        (
            {"preset": "dr_grpo", "agg": {"length": 256}},
            PLAIN,
            "agg.length is 256, and answers have at most sampling.max_tokens = 8: the loss is 0.0312 times",
        ),
        (
            {"preset": "grpo", "grad2": {"kind": "kl", "estimator": "k1"}},
            PLAIN,
            "grad2.estimator k1 has no gradient in expectation",
        ),
    ],
)
def test_rarely_intended_objective_settings_cause_a_warning(table, setting, sentence):
    (warning,) = doubts(resolve(table, max_tokens=setting.max_tokens), setting)
    assert warning.startswith(sentence)


@pytest.mark.parametrize("name", [*PRESETS])
def test_no_objective_preset_causes_a_warning_in_a_run_with_groups(name):
    assert list(doubts(resolve(name, max_tokens=8), PLAIN)) == []
    assert list(doubts(resolve(name), PLAIN)) == []


def test_kl_cov_objective_causes_a_warning_if_each_batch_gets_only_one_optimizer_step():
    warnings = list(doubts(resolve("kl_cov"), RECOMPUTED))
    assert any(sentence.startswith("grad2 kl_cov penalises the distance to π_old") for sentence in warnings)
    assert not list(doubts(resolve("kl_cov"), replace(RECOMPUTED, updates=4)))
