"""`pipelinerl simulate` from a run or a hardware table: predictions, a recommendation, and their accuracy."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from pipelinerl.cli import app
from pipelinerl.config.recipe import load, save
from pipelinerl.errors import RecipeError, UserError
from pipelinerl.plugins.simulation.from_recipe import setting_of
from pipelinerl.plugins.simulation.hardware import EngineTimes
from pipelinerl.plugins.simulation.setting import FixedLengths
from pipelinerl.staleness import StalenessBounds
from tests.plugins.simulation.recorded import run_events

TABLE = """
[engine]
step_s = 0.01
row_s = 0.0001
[trainer]
token_s = 1e-4
[prices]
engine_hour = 2.0
trainer_hour = 4.0
[answers]
lengths = "heavy:6,0.5"
prompt_tokens = 9
"""
ENGINE = EngineTimes(step_s=0.011, row_s=0.0002)


def simulate(*arguments):
    return CliRunner().invoke(app, ["simulate", *arguments, "--steps", "12"])


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "hardware.toml"
    path.write_text(TABLE)
    return str(path)


def run_directory(where, events):
    """Write a finished lockstep run of the recipe `tiny`, with the given events and with answers of 6 tokens."""
    (where / "samples").mkdir(parents=True)
    save(load("tiny", ["staleness.j=1", "staleness.k=1"]), where / "recipe.toml")
    (where / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    answers = [{"text": "x", "outcome": "wrong", "length": 6}] * 8
    group = {"kind": "trained", "step": 1, "time": 1.0, "group_id": "g", "domain": "d", "prompt": "p"}
    (where / "samples" / "training-000001.jsonl").write_text(json.dumps(group | {"answers": answers}) + "\n")
    return where


def test_simulated_sweep_is_printed_plotted_and_followed_by_a_recommendation(table, tmp_path):
    page = tmp_path / "page.html"
    command_line = ("tiny", "--hardware", table, "--sweep", "engine.count=1,2", "--sweep", "staleness.k=0,1,8")
    result = simulate(*command_line, "--html", str(page))
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert {"tokens/s", "trainer waits", "discarded", "per hour"} <= {cell.strip() for cell in lines[0].split("  ")}
    assert sum("staleness.k=8" in line for line in lines[1:5]) == 2
    assert any("must be at least j = 1" in line for line in lines)
    assert "recommended: engine.count=" in result.output
    assert "as good as the hardware table" in result.output
    text = page.read_text()
    assert text.count("<svg") >= 10
    assert "http" not in text


def test_simulation_with_a_published_hardware_table_says_that_its_numbers_were_not_measured_here():
    changes = ("sampling.max_tokens=2048", "engine.context_length=4096", "engine.slots=64")
    result = simulate(
        "tiny", *changes, "--hardware", "h100:0.5b", "--lengths", "heavy:300,1", "--sweep", "engine.count=1,2"
    )
    assert result.exit_code == 0, result.output
    assert "Published figures, not measured here" in result.output
    assert "training at 40%" in result.output


def test_simulation_prints_its_predictions_as_json(table):
    printed = json.loads(simulate("tiny", "--hardware", table, "--json", "--lengths", "fixed:5").output)
    (trial,) = printed["trials"]
    prediction = trial["prediction"]
    assert prediction["cost_per_hour"] == 6.0
    assert prediction["tokens_per_s"] == pytest.approx(prediction["rollouts_per_s"] * 5)
    assert sum(prediction["staleness"].values()) == pytest.approx(1)
    assert printed["recommended"] is None


def test_simulation_calibrated_on_the_first_half_of_a_run_is_validated_on_its_second_half(tmp_path):
    """A run with similar halves is predicted well. For a run that slowed down, the command warns of its prediction."""
    even = run_directory(tmp_path / "even", run_events(engine=ENGINE, rollouts=256, steps=40))
    result = simulate("tiny", "--from", str(even))
    assert result.exit_code == 0, result.output
    assert "second half from the first: step_s" in result.output
    assert "The model is within" in result.output
    slower = [
        event | {"elapsed_s": event["elapsed_s"] + max(0.0, event["elapsed_s"] - 50)}
        for event in run_events(engine=ENGINE, rollouts=256, steps=40)
    ]
    uneven = run_directory(tmp_path / "uneven", slower)
    assert "NOT TO BE TRUSTED" in simulate("tiny", "--from", str(uneven)).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "either --from RUN"),
        (("--hardware", "nowhere.toml"), "cannot be read"),
        (("--hardware", "h100"), "give ACCELERATOR:SIZE"),
        (("--hardware", "h100:8b"), "no published table is called 'h100:8b'"),
        (("--from", "nowhere"), "cannot be used for calibration"),
        (("--hardware", "h100:72b", "--lengths", "fixed:5"), "raise engine.devices"),
    ],
    ids=["neither", "no table", "no size", "unknown size", "no run", "no memory"],
)
def test_simulation_without_a_readable_run_or_table_is_rejected(arguments, message):
    result = simulate("tiny", *arguments)
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("[engine]\nstep_s = 1.0\n", "trainer must be given"),
        ("[engine]\nstep_s = 1.0\n[trainer]\ntoken_s = 1.0\n[planet]\n", "unknown section planet"),
        ("[engine]\nsteps = 1.0\n[trainer]\ntoken_s = 1.0\n", "engine must be a table with step_s"),
        ("[engine]\nstep_s = -1.0\n[trainer]\ntoken_s = 1.0\n", "engine.step_s must not be negative"),
        ("[engine]\nstep_s = 'x'\n[trainer]\ntoken_s = 1.0\n", "Expected `float`"),
        ("[engine]\nstep_s = 1.0\n[trainer]\ntoken_s = 1.0\n[answers]\nlengths = 4\n", "answers may hold only lengths"),
        ("[engine]\nstep_s = 1.0\n[trainer]\ntoken_s = 1.0\n", "give --lengths"),
        ("[engine]\nstep_s = 1.0\n[trainer]\ntoken_s = 1.0\n[answers]\nlengths = 'long'\n", "lengths must be fixed:"),
    ],
)
def test_error_about_a_hardware_table_names_the_invalid_key(table, message, tmp_path):
    path = tmp_path / "hardware.toml"
    path.write_text(table)
    result = simulate("tiny", "--hardware", str(path))
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


@pytest.mark.parametrize("axis", ["engines=1,2", "engine.count", "engine.count=1,,2"])
def test_invalid_sweep_axis_is_rejected(axis, table):
    result = simulate("tiny", "--hardware", table, "--sweep", axis)
    assert isinstance(result.exception, UserError)
    assert "section.key=value" in str(result.exception)


def test_settings_of_a_simulation_are_derived_from_the_sections_of_the_recipe():
    changes = ["staleness.mode=rlax", "engine.count=3", "engine.on_update=drain", "training.mini_batches=4"]
    config = load("tiny", [*changes, "training.epochs=2", "actor.count=2"])
    config_setting = setting_of(config, lengths=FixedLengths(5), prompt_tokens=7)
    expected: dict[str, Any] = {
        "bounds": StalenessBounds(16, 32), "auto_j": False, "engines": 3, "on_update": "drain", "mini_batches": 4,
        "epochs": 2, "actors": 2, "rollouts_per_step": 256, "group_size": 8, "slots": 256,
        "groups_in_flight": 192,  # for each of two actors: 4 · 3 engines · 256 slots / 8 samples / 2
    }  # fmt: skip
    assert {name: getattr(config_setting, name) for name in expected} == expected


def test_simulation_predicts_the_lag_that_a_run_chooses(table):
    result = simulate(
        "tiny", "--hardware", table, "--sweep", "staleness.mode=on_policy,auto", "--steps", "40", "--json"
    )
    on_policy, auto = (trial["prediction"] for trial in json.loads(result.output)["trials"])
    assert on_policy["staleness_mean"] == 1 and on_policy["learning"] == 1
    assert auto["ahead"] >= 2 and auto["learning"] < 1 and auto["step_s"] < on_policy["step_s"]
    config = load("tiny", ["staleness.mode=auto", "objective=ppo_recomputed"])
    unpriced = setting_of(config, lengths=FixedLengths(5), prompt_tokens=7)
    assert unpriced.bounds == StalenessBounds(1, 1), "nothing in this objective corrects for lag"


@pytest.mark.parametrize(
    "change", ["staleness.overdue=wait", "staleness.scope=rollout", "training.tokens_per_step=100"]
)
def test_simulation_rejects_settings_that_it_does_not_model(change):
    with pytest.raises(RecipeError, match="is not simulated"):
        setting_of(load("tiny", [change]), lengths=FixedLengths(5), prompt_tokens=7)
