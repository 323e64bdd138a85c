"""Checkpoints survive kills, truncation and bit flips are detected, and Hugging Face loads checkpoint directories."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipelinerl.errors import CheckpointError, DeadlineError, FencedError, RunFailed
from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.training.checkpoints import checkpoint
from pipelinerl.training.checkpoints.checkpoint import CheckpointFence, CheckpointStore, load
from pipelinerl.training.checkpoints.manifest import Retention, TrainingState
from tests.fakes.checkpoints import LAYOUT, capture, model_directory, save, state_of, weights_of
from tests.patience import PATIENCE_S
from trainer_contract.types import TrainerSpec

SHIPPED = Path(__file__).resolve().parents[3] / "pipelinerl" / "models" / "tiny_speller"


class Killed(BaseException):
    """Raised to simulate that the process is killed; no code under test catches it."""


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", keep=2, model_directory=model_directory(tmp_path / "model"))


def latest(store):
    newest = store.latest()
    return newest[1] if newest else None


def test_saved_checkpoint_is_the_latest_and_contains_model_trainer_state_and_manifest(store):
    assert store.latest() is None and store.oldest_kept_offsets() == {}
    path = save(store, 3)
    assert store.latest() == (path, state_of(3))
    assert path.name == "step-000003"
    names = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    assert names == ["config.json", "manifest.json", "model.safetensors", "tokenizer.json", "trainer/optimizer"]
    assert BigramModel.load(path).logits.tolist() == np.full((5, 5), 3.0).tolist()


def test_checkpoint_store_keeps_the_newest_checkpoints_by_step_number(store):
    for version in (9, 99, 999_999):
        save(store, version)
    assert [path.name for path in store.all()] == ["step-000099", "step-999999"]
    assert store.oldest_kept_offsets() == state_of(99).offsets
    save(store, 1_000_000)
    assert latest(store) == state_of(1_000_000), "by number, not by name"
    assert [path.name for path in store.all()] == ["step-999999", "step-1000000"]


def operations(monkeypatch, killed_at):
    """Patch the file operations of a save, so that `Killed` is raised before operation number `killed_at`.

    Return the list to which each operation that was done appends its name.
    """
    done = []

    def counted(name, call):
        def wrapper(*args, **rest):
            if len(done) == killed_at:
                raise Killed
            done.append(name)
            return call(*args, **rest)

        return wrapper

    monkeypatch.setattr(shutil, "copyfile", counted("copy", shutil.copyfile))
    monkeypatch.setattr(shutil, "rmtree", counted("remove", shutil.rmtree))
    monkeypatch.setattr(os, "fsync", counted("sync", os.fsync))
    monkeypatch.setattr(Path, "write_text", counted("write", Path.write_text))
    monkeypatch.setattr(Path, "rename", counted("rename", Path.rename))
    return done


@pytest.mark.parametrize("again", [False, True], ids=["new step", "step of an abandoned epoch"])
def test_newest_complete_checkpoint_can_be_loaded_after_a_kill_at_any_point_of_a_save(store, monkeypatch, again):
    old, new = state_of(2), state_of(4, epoch=2)
    for killed_at in range(100):
        save(store, 2)
        if again:
            save(store, 4)
        with monkeypatch.context() as patched:
            done = operations(patched, killed_at)
            try:
                save(store, 4, epoch=2)
            except Killed:
                whole = False
            else:
                whole = True
        newest = latest(store)
        assert newest in (state_of(4) if again else old, new), done
        if "rename" in done and done[-1] != "rename":
            assert newest == new, "what was renamed and synced is there"
        if whole:
            assert {"copy", "write", "sync", "rename"} <= set(done)
            assert done.index("rename") > max(i for i, name in enumerate(done) if name == "write")
            break
        shutil.rmtree(store.directory / "step-000004", ignore_errors=True)
    else:
        pytest.fail("save never ended")
    save(store, 6)
    assert not list(store.directory.glob(".*")), "what the killed ones left is gone"


def test_capture_that_fails_frees_its_space_and_leaves_the_newest_checkpoint(store):
    def full(path):
        (path / "optimizer").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    save(store, 2)
    with pytest.raises(OSError, match="No space left"):
        store.capture(state_of(4), layout=LAYOUT, weights=weights_of(4), parts={"trainer": full})
    assert [path.name for path in store.directory.iterdir() if path.is_dir()] == ["step-000002"]
    save(store, 4)
    assert latest(store) == state_of(4)


def test_damaged_checkpoint_is_reported_and_skipped(store, caplog):
    """`tests/faults/test_checkpoint_damage.py` flips and cuts every file."""
    save(store, 2)
    file = save(store, 4) / "trainer" / "optimizer"
    whole = file.read_bytes()
    file.write_bytes(whole + b"x")
    assert latest(store) == state_of(2) and "skipping a damaged checkpoint" in caplog.text
    file.write_bytes(whole)
    assert latest(store) == state_of(4)


@pytest.mark.parametrize("unreadable", [False, True], ids=["all damaged", "directory unreadable"])
def test_run_whose_checkpoints_are_all_damaged_or_unreadable_is_not_restarted_from_scratch(store, unreadable):
    for version in (2, 4):
        (save(store, version) / "model.safetensors").unlink()
    if unreadable:
        store.directory.rename(store.directory.with_name("away"))
        store.directory.write_text("")  # a file in place of the directory, because root can list any directory
    words = (
        r"checkpoints: Not a directory" if unreadable else r"no checkpoint in .* is whole, the newest is step-000004"
    )
    with pytest.raises(RunFailed, match=words):
        store.latest()
    assert unreadable or len(store.all()) == 2, "nothing was touched"


@pytest.mark.parametrize("manifest", ["[]", "3", "{}", '{"format": 1}', '{"format": 3, "state": {}, "files": {}}'])
def test_checkpoint_with_an_invalid_manifest_is_rejected(store, manifest):
    path = save(store, 2)
    (path / "manifest.json").write_text(manifest)
    with pytest.raises(CheckpointError, match="choose another checkpoint"):
        load(path)
    assert store.oldest_kept_offsets() == {}


def test_checkpoint_commit_that_fails_after_the_rename_can_be_retried(store, monkeypatch):
    save(store, 2)
    save(store, 4)
    captured, sync = capture(store, state_of(4, epoch=2)), checkpoint.sync

    def broken(path):
        if path == store.directory:
            raise OSError(5, "Input/output error")
        sync(path)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "sync", broken)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output error"):
                store.commit(captured)
            assert latest(store) == state_of(4, epoch=2)
    assert store.commit(captured).name == "step-000004"
    assert [path.name for path in sorted(store.directory.iterdir())] == ["step-000002", "step-000004"]


def test_failed_removal_of_an_old_checkpoint_is_logged_and_retried(store, monkeypatch, caplog):
    def busy(path, ignore_errors=False):
        raise OSError(39, "Directory not empty", str(path))

    for version in (1, 2):
        save(store, version)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", busy)
        for version in (3, 4):
            save(store, version)
    assert [path.name for path in store.all()] == ["step-000003", "step-000004"]
    assert "step-000001 cannot be removed now: [Errno 39] Directory not empty" in caplog.text
    save(store, 5)
    assert not list(store.directory.glob(".*")), "it is tried again"


def test_transformers_loads_a_checkpoint_directory(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pipelinerl.trainers.torch.trainer import TorchTrainer

    trainer = TorchTrainer()
    trainer.init_worker(TrainerSpec(model_path=SHIPPED))
    store = CheckpointStore(tmp_path, keep=1, model_directory=SHIPPED)
    captured = store.capture(
        state_of(0),
        layout=trainer.weight_layout(),
        weights=trainer.gather_weights(),
        parts={"trainer": trainer.save_state},
    )
    path = store.commit(captured)
    trainer.close()
    loaded, original = (AutoModelForCausalLM.from_pretrained(p, local_files_only=True) for p in (path, SHIPPED))
    for (name, given), (other, expected) in zip(loaded.named_parameters(), original.named_parameters(), strict=True):
        assert name == other and torch.equal(given, expected)
    assert len(AutoTokenizer.from_pretrained(path, local_files_only=True)) == 57
    assert json.loads((path / "config.json").read_text())["model_type"] == "qwen3"
    assert store.latest() == (path, state_of(0))


@pytest.fixture
def stores(tmp_path):
    """Return two checkpoint stores on the same directory: of an earlier trainer, and of the one that replaces it."""
    model = model_directory(tmp_path / "model")
    first, second = (CheckpointStore(tmp_path / "checkpoints", keep=1, model_directory=model) for _ in range(2))
    return first, second


def test_trainer_that_was_replaced_cannot_commit_a_checkpoint_that_it_captured_earlier(stores):
    first, second = stores
    first.claim(1)
    kept = first.commit(capture(first, state_of(1, epoch=1)))
    late = capture(first, state_of(2, epoch=1))
    second.claim(2)
    with pytest.raises(FencedError, match="epoch 2 has taken over"):
        first.commit(late)
    with pytest.raises(FencedError):
        capture(first, state_of(3, epoch=1))
    assert second.all() == [kept] and second.claimed_epoch == 2
    second.commit(capture(second, state_of(2, epoch=2)))
    newest = second.latest()
    assert newest is not None and (newest[1].epoch, newest[1].model_version) == (2, 2)


def test_commit_raises_a_fenced_error_if_a_later_trainer_has_removed_the_unfinished_checkpoint(stores, monkeypatch):
    first, second = stores
    late, sync = capture(first, state_of(2, epoch=1)), checkpoint._sync_tree

    def synced(directory):
        monkeypatch.setattr(checkpoint, "_sync_tree", sync)
        second.claim(2)
        capture(second, state_of(2, epoch=2))
        sync(directory)

    monkeypatch.setattr(checkpoint, "_sync_tree", synced)
    with pytest.raises(FencedError):
        first.commit(late)


@pytest.mark.parametrize(
    ("resumed", "words"),
    [
        (0, "step-000001 appeared while this trainer began from the beginning"),
        (1, "step-000002 appeared while this trainer began from step-000001"),
    ],
)
def test_trainer_cannot_claim_a_checkpoint_store_with_a_newer_checkpoint_than_it_began_from(stores, resumed, words):
    first, second = stores
    for version in range(1, resumed + 1):
        first.commit(capture(first, state_of(version, epoch=1)))
    assert (latest(second) is not None) == bool(resumed)
    first.commit(capture(first, state_of(resumed + 1, epoch=1)))
    with pytest.raises(CheckpointError, match=words):
        second.claim(2)


def test_damaged_checkpoints_are_renamed_and_do_not_count_as_kept_checkpoints(stores, caplog):
    _, second = stores
    first = CheckpointStore(second.directory, keep=3, model_directory=second.directory.with_name("model"))
    for version in (10, 20, 30):
        first.commit(capture(first, state_of(version, epoch=1)))
    for version in (20, 30):
        (first.directory / f"step-{version:06d}" / "model.safetensors").write_bytes(b"")
    newest = second.latest()
    assert newest is not None and newest[1].model_version == 10
    second.claim(2)
    assert [path.name for path in second.all()] == ["step-000010"]
    for version in (20, 30):
        assert (second.directory / f"damaged-e2-step-{version:06d}" / "manifest.json").is_file()
        assert f"moved to {second.directory}/damaged-e2-step-{version:06d}" in caplog.text
    for version in (12, 14):
        second.commit(capture(second, state_of(version, epoch=2)))
        assert [path.name for path in second.all()] == [f"step-{version:06d}"]
        assert second.oldest_kept_offsets() == state_of(version).offsets
    assert len(list(second.directory.glob("damaged-*"))) == 2, "nothing removes them silently"


def test_checkpoint_lock_is_released_when_its_holder_is_killed(tmp_path):
    program = (
        "import sys, time; from pathlib import Path\n"
        "from pipelinerl.training.checkpoints.checkpoint import CheckpointFence\n"
        "with CheckpointFence(Path(sys.argv[1])).held(1): print('held', flush=True); time.sleep(600)\n"
    )
    argv = [sys.executable, "-c", program, str(tmp_path / "checkpoints")]
    fence = CheckpointFence(tmp_path / "checkpoints", deadline_s=0.2)
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(DeadlineError, match=r"checkpoints\.lock"):
            fence.claim(2)
        holder.kill()
        holder.wait(PATIENCE_S)
        fence.claim(2)
    with pytest.raises(FencedError):
        fence.claim(1)
    assert fence.epoch == 2


@pytest.mark.parametrize(
    ("retention", "accuracies", "good", "survivors", "resumable"),
    [
        (Retention(keep=2), {10: 0.9}, None, {30, 40}, [30, 40]),
        (Retention(keep=1, keep_best=2), {10: 0.5, 20: 0.7, 30: 0.6, 40: 0.1, 999: 1.0}, None, {20, 30, 40}, [40]),
        (Retention(keep=1, keep_best=1), {10: 0.5, 20: 0.5}, None, {20, 40}, [40]),
        (Retention(keep=1), {}, 25, {20, 40}, [20, 40]),
        (Retention(keep=1), {}, 3, {40}, [40]),
    ],
    ids=["newest", "best", "the later of equals", "newest good", "no good one"],
)
def test_newest_best_and_good_checkpoints_are_kept_and_the_best_do_not_hold_back_the_stream(
    retention, accuracies, good, survivors, resumable
):
    versions = [40, 10, 30, 20]
    assert retention.survivors(versions, accuracies, good=good) == survivors
    assert retention.resumable(versions, good=good) == resumable


def test_checkpoint_accuracy_is_that_of_the_first_evaluation_set_with_missing_answers_as_wrong():
    results = [
        {"model_version": 10, "accuracy": 0.5, "at_least": 0.5},
        {"model_version": 20, "accuracy": 0.9, "at_least": 0.3, "incomplete": "1 of 3 problems had no answer"},
        {"model_version": 30, "accuracy": 0.25},
        {"model_version": 40, "accuracy": None, "at_least": None},
    ]
    state = TrainingState(model_version=30, epoch=1, offsets={}, ledger={}, controller={"evaluations": results})
    assert state.accuracies == {10: 0.5, 20: 0.3}
    results.append({"model_version": 20, "at_least": 0.9, "name": "second", "place": 1})
    assert state.accuracies == {10: 0.5, 20: 0.3}, "the recipe's first set decides"


def test_rewind_goes_to_the_newest_good_checkpoint_and_keeps_the_newer_ones_aside(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=9, model_directory=model_directory(tmp_path / "model"))
    paths = [save(store, version) for version in (5, 10, 15)]
    assert store.rewind(1, 12) == 10 and latest(store) == state_of(10)
    assert load(store.directory / "rewound-e1-step-000015") == state_of(15)
    assert store.rewind(1, 3) == 5, "without a good one, the oldest"
    assert store.rewind(1, 7) == 5 and store.all() == [paths[0]], "the trainer may be ahead of it"
