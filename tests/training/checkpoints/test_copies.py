"""Remote copies of checkpoints, in a directory or at a URL: they are always complete; newest and best are kept."""

import logging
from dataclasses import replace

import pytest

from pipelinerl.errors import CheckpointError, FencedError
from pipelinerl.system.storage import Storage
from pipelinerl.training.checkpoints.checkpoint import CheckpointStore, load
from pipelinerl.training.checkpoints.copies import CheckpointCopies
from pipelinerl.training.checkpoints.manifest import Retention
from tests.fakes.checkpoints import capture, model_directory, save, state_of, versions_in


@pytest.fixture(params=["directory", "memory"])
def url(request, tmp_path):
    return f"file://{tmp_path}/copies" if request.param == "directory" else f"memory://{tmp_path.name}/copies"


@pytest.fixture
def copies(url, tmp_path):
    (tmp_path / "recipe.toml").write_text("name = 'x'\n")
    files = (tmp_path / "recipe.toml", tmp_path / "events.jsonl")
    return CheckpointCopies(url, retention=Retention(2, 1), run_files=files)


@pytest.fixture
def store(tmp_path, copies):
    model = model_directory(tmp_path / "model")
    return CheckpointStore(tmp_path / "checkpoints", keep=2, keep_best=1, model_directory=model, copies=copies)


def save_both(store, version, **rest):
    store.copy(save(store, version, **rest))


def versions(copies):
    return [copy.manifest.state.model_version for copy in copies.newest()]


def test_trainer_that_was_replaced_cannot_copy_its_checkpoint_over_that_of_a_later_epoch(store, copies, tmp_path):
    """The trainer copies step 10 of epoch 1 after epoch 2 has resumed from there and copied step 20."""
    store.claim(1)
    late = save(store, 10)
    successor = CheckpointStore(
        tmp_path / "checkpoints", keep=2, model_directory=model_directory(tmp_path / "model-2"), copies=copies
    )
    successor.latest()
    successor.claim(2)
    save_both(successor, 20, epoch=2)
    with pytest.raises(FencedError, match=r"step-000020-e2-.* is of a later epoch than 1"):
        store.copy(late)
    assert versions(copies) == [20]


def test_fetched_remote_copy_is_a_loadable_checkpoint_with_the_runs_recipe_and_events(store, copies, tmp_path):
    (tmp_path / "events.jsonl").write_text('{"kind": "step"}\n{"kind": "st')
    save_both(store, 3)
    (copy,) = copies.newest()
    into = tmp_path / "elsewhere" / copy.name
    copies.fetch(copy, into)
    assert load(into) == state_of(3) and versions_in(into, state_of(3)) == {3}
    assert into.name == "step-000003"
    assert (into / "run" / "recipe.toml").read_text() == "name = 'x'\n"
    assert (into / "run" / "events.jsonl").read_text() == '{"kind": "step"}\n', "without the line under way"


def test_newest_and_best_checkpoints_are_kept_locally_and_at_the_remote_location(store, copies):
    save_both(store, 10)
    save_both(store, 20, accuracies={10: 0.4})
    save_both(store, 30, accuracies={10: 0.4, 20: 0.6})
    save_both(store, 40, accuracies={10: 0.4, 20: 0.6, 30: 0.2})
    assert versions(copies) == [40, 30, 20]
    assert [path.name for path in store.all()] == ["step-000020", "step-000030", "step-000040"]
    assert store.oldest_kept_offsets() == state_of(30).offsets, "the best is not waited for"
    save_both(store, 50, accuracies={10: 0.4, 20: 0.6, 30: 0.2, 40: 0.9})
    assert versions(copies) == [50, 40] and len(Storage(copies.url).names()) == 2


def test_remote_copy_of_a_step_that_was_saved_again_counts_as_newer_than_the_earlier_copy(store, copies, monkeypatch):
    """Each save of the step has another ledger, which identifies its copy; older copies are not removed."""
    ledgers = []
    for frontier in range(6):
        state = replace(state_of(2), ledger={"frontier": frontier})
        with monkeypatch.context() as patched:
            patched.setattr(Storage, "remove", lambda *_: None)
            store.copy(store.commit(capture(store, state)))
        ledgers.append(next(copies.newest()).manifest.state.ledger["frontier"])
    assert ledgers == [0, 1, 2, 3, 4, 5] and len(Storage(copies.url).names()) == 6
    store.copy(store.all()[-1])
    assert [copy.manifest.state.ledger["frontier"] for copy in copies.newest()] == [5]
    assert [copy.name for copy in copies.newest()] == ["step-000002"]


def test_remote_copies_of_steps_after_the_resumed_step_are_removed_and_older_copies_are_kept(
    store, copies, tmp_path, caplog
):
    for version in (10, 20, 30):
        save_both(store, version)
    (store.directory / "step-000030" / "model.safetensors").write_bytes(b"")
    again = CheckpointStore(store.directory, keep=2, model_directory=tmp_path / "model", copies=copies)
    assert again.latest() == (store.directory / "step-000020", state_of(20))
    again.claim(2)
    save_both(again, 22, epoch=2)
    assert versions(copies) == [22, 20]
    assert "step-000030-e1-" in caplog.text and "the run continued from an earlier checkpoint" in caplog.text


class Killed(BaseException):
    """Raised to simulate that the process is killed."""


def test_newest_remote_checkpoint_copy_is_complete_after_a_kill_at_any_point_of_a_save(
    store, copies, tmp_path, monkeypatch
):
    """The test repeats the save, with a kill before another storage operation each time."""
    save_both(store, 1)
    save_both(store, 2)
    path = save(store, 3)
    for killed_at in range(100):
        done = []

        def counted(name, call, at, done):
            def wrapper(*args):
                if len(done) == at:
                    raise Killed
                done.append(name)
                return call(*args)

            return wrapper

        with monkeypatch.context() as patched:
            for name in ("write", "upload", "remove"):
                patched.setattr(Storage, name, counted(name, getattr(Storage, name), killed_at, done))
            try:
                copies.save(path)
            except Killed:
                whole = False
            else:
                whole = True
        newest = next(copies.newest())
        assert newest.manifest.state.model_version in (2, 3)
        copies.fetch(newest, tmp_path / str(killed_at))
        if whole:
            assert versions(copies) == [3, 2]
            assert killed_at >= 7, "five files, the manifest, and what it takes to remove the oldest"
            return
    pytest.fail("save never ended")


@pytest.mark.parametrize(
    ("name", "damage"), [("manifest.json", "flip"), ("trainer/optimizer", "cut"), ("run/recipe.toml", "lose")]
)
def test_damaged_remote_checkpoint_copy_is_detected_and_reported(store, copies, tmp_path, caplog, name, damage):
    save_both(store, 1)
    save_both(store, 2)
    newest, place = next(copies.newest()), Storage(copies.url)
    data = bytearray(place.read(f"{newest.folder}/{name}"))
    data[len(data) // 2] ^= 1
    if damage == "lose":
        place.remove(f"{newest.folder}/{name}")
    else:
        place.write(f"{newest.folder}/{name}", bytes(data) if damage == "flip" else bytes(data[:-1]))
    with caplog.at_level(logging.ERROR):
        if name == "manifest.json":
            assert versions(copies) == [1]
            assert "skipping a" in caplog.text
            return
        with pytest.raises(CheckpointError, match=rf"{name} (has changed|is missing)"):
            copies.fetch(next(copies.newest()), tmp_path / "elsewhere")
