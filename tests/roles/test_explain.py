"""`pipelinerl explain` as it is called: presets, recipes, rollouts in JSON and in records, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipelinerl.cli import app
from pipelinerl.errors import UserError
from pipelinerl.objective.catalogue import PRESETS
from pipelinerl.streams.records import encode_group
from tests.fakes.rollouts import group

ROLLOUT = {"reward": 1, "tokens": ["so", "[4]"], "behavior_logprobs": [-1, -0.7], "logprobs": [-1, -0.3]}
OTHER = {"reward": 0, "tokens": ["5"], "behavior_logprobs": [-1.7]}


def explain(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.fixture
def stored(tmp_path: Path) -> Callable[[Any], str]:
    def store(content: Any) -> str:
        path = tmp_path / "rollouts.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return store


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_explains_itself(name: str) -> None:
    said = explain(name)
    assert said.startswith(f"{name}: ") and "sg[agg · is_weight]" in said
    for slot in ("agg", "is_weight", "adv", "grad1", "grad2"):
        assert f"\n{slot}" in said
    assert f"groups whose rewards are all equal: {PRESETS[name].no_signal}" in said
    if PRESETS[name].objective.passes:
        assert all(f"{column} (" in said for column in PRESETS[name].objective.passes)
    else:
        assert "needs nothing but" in said


def test_without_a_choice_the_presets_are_listed() -> None:
    lines = explain().splitlines()
    assert [line.split()[0] for line in lines] == ["preset", *PRESETS]
    assert next(line for line in lines if line.startswith("ppo ")).rstrip().endswith("values")


def test_a_recipe_is_explained_with_its_changes() -> None:
    said = explain("tiny", "training.no_signal=filter", "objective.grad1.epsilon_high=0.31")
    assert said.startswith("pipelinerl with changes: ")
    assert "r_t > 1.31" in said and "all equal: filter" in said


def test_tokens_of_stored_rollouts(stored: Callable[[Any], str]) -> None:
    lines = explain("grpo", "--rollout", stored({"rollouts": [ROLLOUT, OTHER]})).splitlines()[-4:]
    assert lines[0].split() == ["rollout", "t", "token", "agg", "is_weight", "adv", "M", "multiplier"]
    assert lines[1].split() == ["0", "0", "'so'", "0.25", "1", "1", "1", "+0.25"]
    assert lines[2].split() == ["0", "1", "'[4]'", "0.25", "1", "1", "0", "+0"]
    assert lines[3].split() == ["1", "0", "'5'", "0.5", "1", "-1", "1", "-0.5"]


def test_a_stored_record_of_a_group(tmp_path: Path) -> None:
    path = tmp_path / "group"
    path.write_bytes(encode_group(group(0)))
    said = explain("ppo_tis", "--rollout", str(path))
    assert len(said.split("multiplier")[1].strip().splitlines()) == sum(r.num_sampled_tokens for r in group(0).rollouts)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is neither a record of a group nor JSON"),
        ([], "must hold"),
        ({"rollouts": []}, "at least one rollout"),
        ({"rollouts": [3]}, r"rollouts\.0 must be an object, got 3"),
        ({"rollouts": [ROLLOUT | {"rewards": 1}]}, r"rollouts\.0\.rewards is unknown; expected any of tokens, reward"),
        ({"rollouts": [ROLLOUT, OTHER | {"reward": "1"}]}, r"rollouts\.1\.reward must be a number, got '1'"),
        ({"rollouts": [ROLLOUT | {"tokens": "so"}]}, r"rollouts\.0\.tokens must be a list of text, got 'so'"),
        ({"rollouts": [ROLLOUT | {"judged": 1}]}, r"rollouts\.0\.judged must be true or false, got 1"),
        ({"rollouts": [ROLLOUT | {"group": "a"}]}, r"rollouts\.0\.group must be a whole number, got 'a'"),
        ({"rollouts": [{"reward": 1, "tokens": ["a"]}]}, r"rollouts\.0\.behavior_logprobs must be given"),
        ({"rollouts": [ROLLOUT | {"logprobs": [True, 0]}]}, r"rollouts\.0\.logprobs must be a list of numbers"),
        ({"rollouts": [ROLLOUT | {"logprobs": [-1]}]}, "rollout 0 has 2 tokens but 1 logprobs"),
    ],
)
def test_a_file_that_is_not_right_is_refused_with_a_sentence(
    content: Any, sentence: str, stored: Callable[[Any], str]
) -> None:
    with pytest.raises(UserError, match=sentence):
        explain("grpo", "--rollout", stored(content))


def test_what_is_not_there_is_refused_with_a_sentence(stored: Callable[[Any], str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'dpo' is neither a preset nor a recipe; presets are reinforce, .*tiny"):
        explain("dpo")
    with pytest.raises(UserError, match=r"grpo is a preset, and run\.seed=1 changes a recipe"):
        explain("grpo", "run.seed=1")
    with pytest.raises(UserError, match="cannot be read: No such file"):
        explain("grpo", "--rollout", str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="rollout 0 has no ref_logprobs, which this objective reads"):
        explain("grpo_kl", "--rollout", stored({"rollouts": [ROLLOUT]}))
