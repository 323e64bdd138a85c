"""Tests of the recipe in which the trainer's compute dominates."""

from benchmarks.chosen_lag import compute_bound, vowels
from pipelinerl.config.recipe import load


def test_compute_bound_recipe_is_valid_and_rewards_the_share_of_vowels(tmp_path):
    (domain,) = load(str(compute_bound(tmp_path))).domains
    assert domain.verifier == "benchmarks.chosen_lag:vowels"
    assert [vowels(None, text) for text in ("", "aei", "ab")] == [0, 1, 0.5]
