"""Resuming a run: from its directory, or from the location of its copies if the directory is lost, but never from
both.
"""

from __future__ import annotations

import logging
import shutil
import stat
from pathlib import Path

import pytest

from launch.run_directory import create
from pipelinerl.config.recipe import RunConfig, load, parse, to_table
from pipelinerl.config.sections import StreamsSection
from pipelinerl.errors import UserError
from pipelinerl.models.bigram import BigramModel
from pipelinerl.roles import resumption
from pipelinerl.roles.wiring import checkpoints_of
from pipelinerl.system.storage import Storage
from pipelinerl.training.checkpoints.checkpoint import CheckpointStore
from tests.fakes.checkpoints import model_directory, save, state_of


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return parse(
        {
            "model": {"path": str(model_directory(tmp_path / "model"))},
            "domains": [{"name": "d", "source": "s"}],
            "run": {"name": "tiny", "directory": str(tmp_path / "runs")},
            "checkpoint": {"location": f"memory://{tmp_path.name}"},
        }
    )


def url_of(config: RunConfig) -> str:
    url = config.checkpoint.url_of(config.run.name)
    assert url is not None
    return url


def begun(config: RunConfig) -> tuple[Path, CheckpointStore]:
    """Return the directory of a run that has begun, and its checkpoints."""
    directory = create(config, claim=resumption.claim)
    return directory.path, checkpoints_of(directory.config, directory.path)


def test_new_run_gets_a_number_if_its_name_is_taken_at_the_location(config: RunConfig, tmp_path: Path) -> None:
    begun(config)
    shutil.rmtree(tmp_path / "runs")  # as on another machine, which lacks the directory
    path, _ = begun(config)
    assert path.name == "tiny-2"
    assert resumption.claim(load(path / "recipe.toml")) is False
    elsewhere = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"location": None})})
    assert resumption.claim(elsewhere) is True


def test_path_is_resumed_in_place(config: RunConfig) -> None:
    path, store = begun(config)
    store.copy(save(store, 3))
    assert resumption.directory_of(str(path)) == path
    assert resumption.directory_of("no/such/run") == Path("no/such/run"), (
        "what is wrong with it is said by the launcher"
    )


def test_url_is_restored_as_a_run_directory_with_checkpoint_recipe_and_events(config: RunConfig) -> None:
    path, store = begun(config)
    (path / "events.jsonl").write_text('{"kind": "run_started"}\n')
    for version in (3, 6):
        store.copy(save(store, version))
    (path / "events.jsonl").unlink()
    shutil.rmtree(path)
    assert resumption.directory_of(url_of(config) + "/") == path
    assert to_table(load(path / "recipe.toml")) == to_table(config)
    assert (path / "events.jsonl").read_text() == '{"kind": "run_started"}\n'
    found = checkpoints_of(config, path).latest()
    assert found is not None and found[1] == state_of(6)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "no draft is left"


def test_no_secret_is_copied_or_readable_by_others(config: RunConfig) -> None:
    url = "redis://ada:s3cret@db:6379/3?db=1&password=s3cret&timeout=9"
    path, store = begun(config.model_copy(update={"streams": StreamsSection(redis_url=url)}))
    address = load(path / "recipe.toml").streams.redis_url
    assert address is not None and address.get_secret_value() == url
    store.copy(save(store, 3))
    place = Storage(url_of(config))
    (copy,) = [name for name in place.names() if name.startswith("step-")]
    for name in ("recipe.toml", f"{copy}/run/recipe.toml"):
        assert b"s3cret" not in place.read(name) and b"ada" not in place.read(name)
    shutil.rmtree(path)
    resumption.directory_of(url_of(config))
    address = load(path / "recipe.toml").streams.redis_url
    assert address is not None and address.get_secret_value() == "redis://db:6379/3?db=1&timeout=9"
    assert stat.S_IMODE((path / "recipe.toml").stat().st_mode) == 0o600


def test_checkpoint_without_a_recipe_uses_the_locations_recipe(config: RunConfig) -> None:
    """The trainer was started on another machine than the controller, with a run directory of its own."""
    path, store = begun(config)
    (path / "recipe.toml").unlink()
    store.copy(save(store, 3))
    shutil.rmtree(path)
    assert resumption.directory_of(url_of(config)) == path
    assert to_table(load(path / "recipe.toml")) == to_table(config)


def test_damaged_copy_is_skipped_and_logged(config: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    path, store = begun(config)
    for version in (3, 6):
        store.copy(save(store, version))
    place = Storage(url_of(config))
    (newest,) = [name for name in place.names() if name.startswith("step-000006")]
    place.write(f"{newest}/model.safetensors", b"other weights")
    shutil.rmtree(path)
    with caplog.at_level(logging.ERROR):
        resumption.directory_of(url_of(config))
    assert "skipping a damaged checkpoint" in caplog.text
    assert [found.name for found in checkpoints_of(config, path).all()] == ["step-000003"]


def test_missing_model_is_taken_from_the_checkpoint(config: RunConfig) -> None:
    path, store = begun(config)
    store.copy(save(store, 3))
    shutil.rmtree(path)
    shutil.rmtree(config.model.resolved)
    resumption.directory_of(url_of(config))
    moved = load(path / "recipe.toml")
    assert moved.model.resolved == path / "model"
    assert BigramModel.load(path / "model").logits[0, 0] == 3.0
    assert sorted(file.name for file in (path / "model").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip
    assert to_table(moved.model_copy(update={"model": config.model})) == to_table(config), "nothing else has changed"


def test_missing_reference_model_is_rejected(config: RunConfig) -> None:
    path, store = begun(config.model_copy(update={"objective": {"preset": "grpo", "grad2": "kl"}}))
    store.copy(save(store, 3))
    shutil.rmtree(path)
    shutil.rmtree(config.model.resolved)
    with pytest.raises(UserError, match="is the reference of this run; copy it here"):
        resumption.directory_of(url_of(config))
    assert not path.exists()


def test_restored_run_without_a_checkpoint_begins_again(config: RunConfig) -> None:
    path, _ = begun(config)
    shutil.rmtree(path)
    assert resumption.directory_of(url_of(config)) == path
    assert sorted(entry.name for entry in path.iterdir()) == ["layout", "recipe.toml"]


def test_two_places_to_resume_from_are_rejected(config: RunConfig) -> None:
    path, store = begun(config)
    store.copy(save(store, 3))
    with pytest.raises(UserError, match=f"resume what is there with --resume {path}"):
        resumption.directory_of(url_of(config))
    store.copy(save(store, 6))  # a newer checkpoint than here, as another machine would copy it
    shutil.rmtree(path / "checkpoints" / "step-000006")
    with pytest.raises(UserError, match=r"continued elsewhere: .* of step 3, .* of step 6"):
        resumption.directory_of(str(path))


def test_url_without_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no run; expected <checkpoint\.location>/<run\.name>"):
        resumption.directory_of(f"file://{tmp_path}/nothing")
