"""A run's directory: numbered, with private files, resumable, used by one launcher at a time."""

from __future__ import annotations

import json
import math
import resource
import stat
from pathlib import Path

import pytest

from launch.run_directory import create, open_run
from pipelinerl.config.recipe import RunConfig, parse, to_table, write_layout
from pipelinerl.errors import RecipeError, UserError


def _config(directory: Path, **sections: object) -> RunConfig:
    return parse(
        {
            "model": {"path": "m"},
            "domains": [{"name": "d", "source": "s", "parameters": {"digits": [1, 2], "ops": "+-"}}],
            "run": {"name": "tiny", "directory": str(directory)},
            **sections,
        }
    )


def test_written_recipe_has_every_key(tmp_path: Path) -> None:
    config = _config(tmp_path, optimizer={"learning_rate": 1e-6}, staleness={"j": 1, "k": math.inf})
    made = create(config)
    assert made.path == tmp_path / "tiny"
    assert to_table(open_run(made.path).config) == to_table(config)
    assert "learning_rate = 1e-06" in made.recipe.read_text()
    assert stat.S_IMODE(made.recipe.stat().st_mode) == 0o600, "it may hold the password of a stream server"


def test_taken_name_gets_a_number(tmp_path: Path) -> None:
    names = [create(_config(tmp_path)).path.name for _ in range(3)]
    assert names == ["tiny", "tiny-2", "tiny-3"]
    assert open_run(tmp_path / "tiny-3").config.run.name == "tiny-3"


def test_name_taken_at_the_checkpoint_location_leaves_no_directory(tmp_path: Path) -> None:
    def refuses(config: RunConfig) -> bool:
        raise UserError("nobody answers there")

    with pytest.raises(UserError, match="nobody answers"):
        create(_config(tmp_path), claim=refuses)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_leaves_no_partial_directory(tmp_path: Path) -> None:
    """The next run would take a partial directory for an existing run, and would be named tiny-2."""
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, allowed[1]))
    try:
        with pytest.raises(UserError, match=r"run.directory: .*tiny cannot be written: File too large"):
            create(_config(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    assert list(tmp_path.iterdir()) == []


def test_tilde_in_the_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _config(Path("~/runs")).run_directory == tmp_path / "runs" / "tiny"


def test_token_is_private_and_new_at_each_launch(tmp_path: Path) -> None:
    made = create(_config(tmp_path))
    seen = []
    for _ in range(2):
        with made.locked():
            seen.append(json.loads(made.tokens.read_text()))
            assert stat.S_IMODE(made.tokens.stat().st_mode) == 0o600
    assert set(seen[0]) == {"token"}
    assert len(seen[0]["token"]) >= 32
    assert seen[0] != seen[1]


def test_directory_has_one_launcher_at_a_time(tmp_path: Path) -> None:
    made = create(_config(tmp_path))
    with made.locked():
        before = made.tokens.read_text()
        with pytest.raises(UserError, match="is being run by process"), open_run(made.path).locked():
            pass
        assert made.tokens.read_text() == before
    with made.locked():
        pass


def test_directory_without_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        open_run(tmp_path)
    (tmp_path / "recipe.toml").write_text("run = 3")
    write_layout(tmp_path)
    with pytest.raises(RecipeError):
        open_run(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "away").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="away/tiny cannot be made"):  # an error, not another attempt
        create(_config(tmp_path / "away"))
    with pytest.raises(UserError, match="cannot be made"):
        create(_config(tmp_path / "file"))
