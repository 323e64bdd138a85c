"""Environments in a recipe: where the reward comes from, which keys contradict each other, and checks of user code."""

import pytest

from pipelinerl.config.domains import DomainSection
from pipelinerl.config.recipe import parse
from pipelinerl.errors import RecipeError
from pipelinerl.plugins.episodes.opening import check_environment

GAME = {"name": "d", "source": "addition", "environment": "game.py:play"}


def domain(**fields):
    return DomainSection.model_validate(GAME | fields)


def test_reward_of_an_episode_comes_from_its_environment_unless_the_recipe_names_a_verifier():
    assert not list(domain().verifiers)
    assert [name for _, name in domain(verifier="math_answer").verifiers] == ["math_answer"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"environment": "nothing"}, "environment must be path.py:name"),
        ({"command": ("a",)}, "environment and command exclude each other"),
        ({"environment": None, "command": ("a",)}, "command needs verifier or rewards"),
        ({"environment": None, "episode": {"max_turns": 2}}, "episode configures an environment, a command or tools"),
        ({"environment": None, "environment_options": {"a": 1}}, "environment_options are arguments of an environment"),
    ],
)
def test_contradictory_environment_keys_are_rejected(fields, message):
    with pytest.raises(ValueError, match=message):
        domain(**fields)


def test_recipe_that_combines_episodes_with_routing_replay_is_rejected():
    table = {"model": {"path": "m"}, "domains": [GAME], "trainer": {"routing_replay": "rollout"}}
    with pytest.raises(RecipeError, match="does not support episodes"):
        parse(table)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def play(task, client): ...", "must be an async function"),
        ("async def play(task): ...", r"must take \(task, client\)"),
        ("async def play(task, client, *, rounds): ...", "missing a required argument: 'rounds'"),
        ("import absent_module", "game.py:1: ModuleNotFoundError"),
    ],
)
def test_error_for_user_code_that_is_not_an_environment_names_its_recipe_key(code, message, tmp_path):
    (tmp_path / "game.py").write_text(code)
    with pytest.raises(RecipeError, match=f"domains.d.environment: .*{message}"):
        check_environment(domain(environment=f"{tmp_path}/game.py:play"))


def test_recipe_with_tools_is_rejected_if_the_sandbox_for_tools_is_missing(monkeypatch):
    tools = domain(environment=None, episode={"tools": ("python",)})
    assert [name for _, name in tools.verifiers] == ["math_answer"]
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RecipeError, match=r"domains\.d\.episode\.tools: .*needs bubblewrap"):
        check_environment(tools)
