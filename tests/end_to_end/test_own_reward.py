"""The two files that docs/start/rewards.md shows first are enough to run with a user's own reward function.

The faster variant of the test also uses a user's own model, a bfloat16 directory, which is the usual case.
"""

import re
from pathlib import Path

import pytest
import torch

from tests.fakes.live_run import launched, output_of
from tests.roles.test_dtypes import directory

PAGE = Path(__file__).parents[2] / "docs" / "start" / "rewards.md"
QUICK = ("run.steps=2", "evaluation.problems=4", "training.rollouts_per_step=32")


def from_the_page(folder):
    """Write the function and the recipe from the docs page into an empty folder; return the path of the recipe."""
    blocks = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (function, recipe) = (text for language, text in blocks[:2])
    assert [language for language, _ in blocks[:2]] == ["python", "toml"]
    assert len((function + recipe).splitlines()) <= 20
    (folder / "rewards.py").write_text(function)
    (folder / "words.toml").write_text(recipe)
    return folder / "words.toml"


def test_second_recipe_on_the_rewards_docs_page_adds_a_reward_function_to_a_verifier(tmp_path):
    recipe = from_the_page(tmp_path)
    (parts,) = re.findall(r"```toml\n(rewards = .*?)```", PAGE.read_text(), re.DOTALL)
    recipe.write_text(recipe.read_text().replace('verifier = "rewards.py:letters"\n', parts))
    output = output_of("check", str(recipe), "evaluation.problems=4")
    assert f"domains.words.rewards.0.function = letters, {tmp_path}/rewards.py:1" in output
    assert "of the reference answer correct, reward 1.2 (letters 1, solved 1)" in output


@pytest.mark.parametrize(
    "overrides", [QUICK, pytest.param((), marks=pytest.mark.slow)], ids=["shortened run", "unchanged recipe"]
)
def test_recipe_and_reward_file_of_the_rewards_docs_page_run_in_an_otherwise_empty_folder(
    overrides, tmp_path, monkeypatch
):
    recipe = from_the_page(tmp_path)
    monkeypatch.chdir(tmp_path)
    if overrides:
        own = directory(tmp_path / "model", torch.bfloat16, config="bfloat16", keep="norm")
        overrides = (*overrides, f"model.path={own}")
    with launched([recipe.name, *overrides], tmp_path / "runs" / "words") as run:
        assert run.end() == 0, run.story()
        assert run.events("engine_verified") and not run.events("engine_lost"), run.story()
        steps = run.events("step")
        assert len(steps) == (2 if overrides else 30)
        assert run.is_gone()
    rewards = [step["reward"] for step in steps]
    assert all(0 < reward < 1 for reward in rewards)
    if not overrides:
        assert sum(rewards[-5:]) > sum(rewards[:5])
