"""Tests of file names in a recipe: relative to the file or command line that contains them, absolute in a saved
recipe.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.config.beside_recipe import resolved_beside
from pipelinerl.config.recipe import RunConfig, load, save

DOMAIN = '[[domains]]\nname = "d"\nsource = "{source}"\nverifier = "{verifier}"\n'


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_path_is_relative_to_the_file_that_contains_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    domain = DOMAIN.format(source="../data.py:rows", verifier="rewards.py:score")
    write(tmp_path / "bases" / "base.toml", f'base = "tiny"\n{domain}[trainer]\ntype = "mine.py:Trainer"\n')
    recipe = write(tmp_path / "run.toml", 'base = "bases/base.toml"\n[engine]\ntype = "engines/mine.py:open"\n')
    monkeypatch.chdir(write(tmp_path / "elsewhere" / "x", "").parent)
    config = load(recipe, ["engine.type=own.py:open"])
    assert config.domains[0].verifier == f"{tmp_path}/bases/rewards.py:score"
    assert config.domains[0].source == f"{tmp_path}/data.py:rows"
    assert config.trainer.type == f"{tmp_path}/bases/mine.py:Trainer"
    assert config.engine.type == f"{tmp_path}/elsewhere/own.py:open"
    assert load(recipe).engine.type == f"{tmp_path}/engines/mine.py:open"


def test_elastic_type_paths_resolve_relative_to_the_recipe(tmp_path: Path) -> None:
    limits = '[elastic.types."mine.py:open"]\nmax = 3\n[elastic.types.torch]\nmax = 2\n'
    config = load(write(tmp_path / "run.toml", f'base = "tiny"\n[engine]\ntype = "mine.py:open"\n{limits}'))
    assert list(config.elastic.types) == [config.engine.type, "torch"] == [f"{tmp_path}/mine.py:open", "torch"]
    save(config, tmp_path / "elsewhere.toml")
    assert load(tmp_path / "elsewhere.toml") == config


def test_saved_recipe_means_the_same_wherever_it_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = 'rewards = [{ function = "r.py:form", weight = 0.2 }, { function = "math_answer" }]'
    recipe = write(
        tmp_path / "run.toml",
        f'base = "tiny"\n[[domains]]\nname = "d"\nsource = "addition"\n{rewards}\ncorrect_at = 0.5',
    )
    config = load(recipe)
    (tmp_path / "runs").mkdir()
    save(config, tmp_path / "runs" / "one.toml")
    monkeypatch.chdir("/")
    again: RunConfig = load(tmp_path / "runs" / "one.toml")
    assert again == config
    assert [part.function for part in again.domains[0].rewards] == [f"{tmp_path}/r.py:form", "math_answer"]
    assert [part.shown_as for part in again.domains[0].rewards] == ["form", "math_answer"]


def test_values_that_are_not_file_names_are_unchanged(tmp_path: Path) -> None:
    table = {
        "engine": {"type": "torch", "options": {"function": "x.py:y"}},
        "domains": [{"name": "x.py:y", "source": "reasoning_gym:chain_sum", "parameters": {"source": "x.py:y"}}],
    }
    assert resolved_beside(table, tmp_path) == table
    for other in ({"verifier": "package.module:attribute"}, {"verifier": "/abs/x.py:y"}):
        assert resolved_beside(other, tmp_path) == other


def test_data_path_on_the_command_line_is_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    block = '[{ name = "d", source = "files", parameters = { path = "mine/*.jsonl" } }]'
    config = load("tiny", [f"domains={block}"])
    assert config.domains[0].parameters == {"path": f"{tmp_path}/mine/*.jsonl"}


def test_file_in_a_domains_command_is_relative_to_the_recipe(tmp_path: Path) -> None:
    domain = 'command = ["python3", "cli.py", "{task}", "--quiet"]\n'
    recipe = write(tmp_path / "run.toml", DOMAIN.format(source="addition", verifier="math_answer") + domain)
    write(tmp_path / "cli.py", "")
    made = load(recipe, ["model.path=m"]).domains[0].command
    assert made == ("python3", f"{tmp_path}/cli.py", "{task}", "--quiet")
