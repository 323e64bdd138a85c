"""Changes of a recipe that `pipelinerl run --resume` accepts, rejects with a reason, and records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.resumed_recipe import BOUND, change_recipe, record_change
from launch.run_directory import create, open_run
from pipelinerl.config.recipe import RunConfig, parse
from pipelinerl.errors import RecipeError, UserError
from pipelinerl.observability.report import write_report
from tests.fakes.checkpoints import model_directory


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Make the directory of a run with two domains."""
    table: dict[str, Any] = {
        "model": {"path": str(model_directory(tmp_path / "model"))},
        "domains": [{"name": "d", "source": "s"}, {"name": "e", "source": "s"}],
        "run": {"name": "tiny", "directory": str(tmp_path / "runs"), "steps": 30},
    }
    return create(parse(table)).path


def changed(run_dir: Path, *overrides: str) -> list[str]:
    return record_change(run_dir, change_recipe(run_dir, overrides), step=3)


def test_change_is_recorded_in_the_recipe_with_its_step(run_dir: Path) -> None:
    said = changed(run_dir, "run.steps=45", "optimizer.learning_rate=1e-5", "staleness.k=4", "domains.e.weight=0.5")
    assert [line.partition(" (was")[0] for line in said] == [
        "resumed at step 3: domains.e.weight = 0.5",
        "resumed at step 3: optimizer.learning_rate = 1e-05",
        "resumed at step 3: run.steps = 45",
        "resumed at step 3: staleness.k = 4",
    ]
    config = open_run(run_dir).config
    assert (config.run.steps, config.optimizer.learning_rate, config.staleness.bounds.k) == (45, 1e-5, 4)
    changed(run_dir, "checkpoint.keep=5")
    lines = (run_dir / "recipe.toml").read_text().splitlines()
    assert "# resumed at step 3: run.steps = 45 (was 30)" in lines
    assert "# resumed at step 3: checkpoint.keep = 5 (was 2)" in lines, "earlier changes stay on record"


def test_report_shows_the_changes_of_the_recipe(run_dir: Path) -> None:
    changed(run_dir, "run.steps=45")
    (run_dir / "events.jsonl").write_text(json.dumps({"time": 1.0, "kind": "run_started", "elapsed_s": 0.0}) + "\n")
    assert "resumed at step 3: run.steps = 45 (was 30)" in write_report(run_dir).html.read_text()


def test_change_to_the_present_value_is_no_change(run_dir: Path) -> None:
    before = (run_dir / "recipe.toml").read_text()
    assert changed(run_dir, "run.steps=30", "run.seed=0") == []
    assert (run_dir / "recipe.toml").read_text() == before


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("run.seed=7", "run.seed cannot change on a resumed run: the problems and answers drawn so far"),
        ("run.name=other", "run.name cannot change on a resumed run: it names the run's directory"),
        ("model.path=elsewhere", "model.path cannot change .* the trainer's state in the checkpoint"),
        ("domains.d.source=other", "domains.d.source cannot change .* drawn so far"),
        ("sampling.group_size=8", "sampling.group_size cannot change .* keep their size"),
        ("objective=grpo", "objective cannot change .* steps taken so far"),
        ("trainer.precision=bf16", "trainer.precision cannot change .* trainer's state"),
        ("training.epochs=2", "training.epochs cannot change .* steps taken so far"),
        ("evaluation.problems=3", "evaluation.problems cannot change .* could not be compared"),
    ],
)
def test_change_that_contradicts_the_checkpoint_is_rejected_by_name(run_dir: Path, override: str, reason: str) -> None:
    before = (run_dir / "recipe.toml").read_text()
    with pytest.raises(RecipeError, match=reason):
        changed(run_dir, "run.steps=45", override)
    assert (run_dir / "recipe.toml").read_text() == before, "nothing of it is changed"


def test_knob_that_was_changed_live_cannot_be_changed_in_the_recipe(run_dir: Path) -> None:
    knobs = {"time": 1.0, "kind": "knobs", "changes": {"k": 9}, "who": "ada", "step": 2}
    (run_dir / "events.jsonl").write_text(json.dumps(knobs) + "\n")
    with pytest.raises(RecipeError, match=r"staleness.k was changed while the run was live.* knobs set .* k=…"):
        changed(run_dir, "staleness.k=4")
    assert changed(run_dir, "optimizer.learning_rate=1e-5")


def test_recipe_of_a_live_run_is_not_changed(run_dir: Path) -> None:
    with open_run(run_dir).locked(), pytest.raises(UserError, match="is being run by process"):
        changed(run_dir, "run.steps=45")
    assert open_run(run_dir).config.run.steps == 30


def test_every_section_has_a_rule_whether_it_may_change() -> None:
    assert RunConfig.model_fields.keys() - BOUND.keys() == set()
