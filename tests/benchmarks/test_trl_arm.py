"""Benchmark runs with TRL use the recipe's problems, rewards and updates; only the slow test runs TRL itself."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from benchmarks.measure import read_record
from benchmarks.trl import TINY, Arm, changed_keys, recorded
from benchmarks.trl_arm import grpo_arguments, judge_of
from benchmarks.trl_smollm2 import SMOLLM2, gain
from pipelinerl.config.recipe import load, to_table
from pipelinerl.roles.problems import training_problems
from tests.patience import PATIENCE_S

FIGURES = (Path(__file__).parents[2] / "docs/reference/figures.md").read_text()


@pytest.mark.parametrize(
    ("benchmark", "recipe", "overrides"), [("trl", TINY.recipe, []), ("trl_smollm2", SMOLLM2.recipe, ["run.steps=30"])]
)
def test_figures_mark_exactly_the_records_of_another_recipe_than_the_one_that_ships(benchmark, recipe, overrides):
    (row,) = (line for line in FIGURES.splitlines() if f"`python -m benchmarks {benchmark}`" in line)
    changed = changed_keys(read_record(benchmark)["recipe"], recipe, overrides)
    assert ("(an earlier version of the recipe)" in row) is bool(changed), changed


def test_recorded_seeds_are_kept_only_if_the_recipe_is_the_same(monkeypatch):
    monkeypatch.setattr("benchmarks.trl.read_record", lambda name: {})
    assert recorded("trl", TINY.recipe) == {}, "without a record, the seeds begin one"
    table = to_table(load(TINY.recipe))
    assert changed_keys(table, TINY.recipe) == []
    assert changed_keys(table, TINY.recipe, ["optimizer.learning_rate=1e-3"]) == ["optimizer.learning_rate"]
    del table["weights"]
    assert changed_keys(table, TINY.recipe) == [], "keys that came later have the defaults of before"
    assert changed_keys(table, TINY.recipe, ["weights.transport=pull"]) == ["weights.transport"]
    monkeypatch.setattr("benchmarks.trl.read_record", lambda name: {"recipe": table | {"optimizer": {}}})
    with pytest.raises(ValueError, match=r"optimizer\..* differ\); measure all seeds again: python -m benchmarks trl"):
        recorded("trl", TINY.recipe)


def test_rewards_in_trl_benchmark_runs_come_from_the_verifiers_of_the_recipe():
    config = load(TINY.recipe)
    problem = training_problems(config).problem(3)
    with judge_of(config) as judge:
        assert judge([problem, problem], [problem.ground_truth, problem.ground_truth + "x"]) == [1.0, 0.0]


def test_trl_arguments_are_derived_from_the_recipe_unless_trl_cannot_express_its_objective():
    config = load(TINY.recipe, ["optimizer.grad_clip=0.5", "sampling.max_tokens=10"])
    given = grpo_arguments(config, steps=7, folder="f")
    assert given["loss_type"] == "dr_grpo"
    assert given["max_grad_norm"] == pytest.approx(0.05)  # a tenth of our limit, as TRL's loss is 1/10 of ours
    assert given["beta"] == 0.0
    assert given["per_device_train_batch_size"] == config.training.rollouts_per_step
    assert given["scale_rewards"] == "none"
    with pytest.raises(ValueError, match="that TRL can express"):
        grpo_arguments(load(TINY.recipe, ["objective=grpo"]), steps=7, folder="f")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is installed by `make bench`")
def test_trl_benchmark_run_trains_and_reports_its_accuracy_curve(tmp_path):
    changes = ["evaluation.interval_steps=1", "evaluation.problems=32", "training.rollouts_per_step=64"]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps(to_table(load(TINY.recipe, changes))))
    order = {"recipe": str(recipe), "seed": 0, "steps": 2, "threads": 1}
    command = [sys.executable, "-m", "benchmarks.trl_arm", json.dumps(order)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert [point[0] for point in result["points"]] == [0, 1, 2]
    assert result["ends"][1] == pytest.approx(result["points"][2][1], abs=0.1)
    assert result["ends"][1] > result["ends"][0] > 0 and result["points"][1][1] > 0


def test_accuracy_gain_is_measured_over_the_first_half_hour_only():
    curve = [(0, 0.0, 0.5), (5, 900.0, 0.75), (10, 1801.0, 1.0)]
    assert gain(Arm(curve, [], load=0.0)) == 0.25
