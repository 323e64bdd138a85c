"""Two trainers that write checkpoints to one directory: the one of the earlier epoch can change nothing."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl.errors import CheckpointError, DeadlineError, FencedError
from pipelinerl.training.checkpoints import checkpoint
from pipelinerl.training.checkpoints.checkpoint import CheckpointStore
from pipelinerl.training.checkpoints.fence import CheckpointFence
from tests.fakes.checkpoints import capture, model_directory, state_of
from tests.patience import PATIENCE_S


@pytest.fixture
def stores(tmp_path: Path) -> tuple[CheckpointStore, CheckpointStore]:
    """Return the stores of the earlier and the later trainer."""
    model = model_directory(tmp_path / "model")
    first, second = (CheckpointStore(tmp_path / "checkpoints", keep=1, model_directory=model) for _ in range(2))
    return first, second


def test_capture_from_before_the_claim_cannot_be_committed_after_it(
    stores: tuple[CheckpointStore, CheckpointStore],
) -> None:
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
    found = second.latest()
    assert found is not None and (found[1].epoch, found[1].model_version) == (2, 2)


def test_drafts_of_two_trainers_are_separate(stores: tuple[CheckpointStore, CheckpointStore]) -> None:
    first, second = stores
    late = capture(first, state_of(2, epoch=1))
    second.claim(2)
    assert capture(second, state_of(2, epoch=2)).directory != late.directory
    assert not late.directory.exists(), "what the fenced one had begun is cleared away"


def test_writer_whose_draft_was_removed_gets_a_fenced_error(
    stores: tuple[CheckpointStore, CheckpointStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = stores
    late, sync = capture(first, state_of(2, epoch=1)), checkpoint._sync_tree

    def synced(directory: Path) -> None:
        monkeypatch.setattr(checkpoint, "_sync_tree", sync)
        second.claim(2)
        capture(second, state_of(2, epoch=2))
        sync(directory)

    monkeypatch.setattr(checkpoint, "_sync_tree", synced)
    with pytest.raises(FencedError):
        first.commit(late)


def test_claim_is_rejected_if_a_newer_checkpoint_appeared_meanwhile(
    stores: tuple[CheckpointStore, CheckpointStore],
) -> None:
    first, second = stores
    first.commit(capture(first, state_of(1, epoch=1)))
    assert second.latest() is not None
    first.commit(capture(first, state_of(2, epoch=1)))
    with pytest.raises(CheckpointError, match="step-000002 appeared while this trainer began from step-000001"):
        second.claim(2)


def test_claim_is_rejected_if_a_first_checkpoint_appeared_meanwhile(
    stores: tuple[CheckpointStore, CheckpointStore],
) -> None:
    first, second = stores
    assert second.latest() is None
    first.commit(capture(first, state_of(1, epoch=1)))
    with pytest.raises(CheckpointError, match="step-000001 appeared while this trainer began from the beginning"):
        second.claim(2)


def test_damaged_later_checkpoint_is_set_aside_and_does_not_evict_new_ones(
    stores: tuple[CheckpointStore, CheckpointStore], caplog: pytest.LogCaptureFixture
) -> None:
    _, second = stores
    first = CheckpointStore(second.directory, keep=3, model_directory=second.directory.with_name("model"))
    for version in (10, 20, 30):
        first.commit(capture(first, state_of(version, epoch=1)))
    for version in (20, 30):
        (first.directory / f"step-{version:06d}" / "model.safetensors").write_bytes(b"")
    found = second.latest()
    assert found is not None and found[1].model_version == 10
    second.claim(2)
    assert [path.name for path in second.all()] == ["step-000010"]
    for version in (20, 30):
        assert (second.directory / f"damaged-e2-step-{version:06d}" / "manifest.json").is_file()
        assert f"set aside: {second.directory}/damaged-e2-step-{version:06d}" in caplog.text
    for version in (12, 14):
        second.commit(capture(second, state_of(version, epoch=2)))
        assert [path.name for path in second.all()] == [f"step-{version:06d}"]
        assert second.oldest_kept_offsets() == state_of(version).offsets
    assert len(list(second.directory.glob("damaged-*"))) == 2, "nothing removes them silently"


def test_earlier_epoch_cannot_claim(tmp_path: Path) -> None:
    fence = CheckpointFence(tmp_path / "checkpoints")
    fence.claim(3)
    fence.claim(3)
    with pytest.raises(FencedError):
        fence.claim(2)
    assert fence.epoch == 3


def test_lock_that_is_never_released_is_named(tmp_path: Path) -> None:
    with (tmp_path / "checkpoints.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DeadlineError, match=r"checkpoints\.lock"):
            CheckpointFence(tmp_path / "checkpoints", deadline_s=0.1).claim(1)


def test_killed_holder_releases_the_lock(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from pipelinerl.training.checkpoints.fence import CheckpointFence\n"
        "with CheckpointFence(Path(sys.argv[1])).held(1): print('held', flush=True); time.sleep(600)\n"
    )
    argv = [sys.executable, "-c", program, str(tmp_path / "checkpoints")]
    fence = CheckpointFence(tmp_path / "checkpoints", deadline_s=0.2)
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(DeadlineError):
            fence.claim(2)
        holder.kill()
        holder.wait(PATIENCE_S)
        fence.claim(2)
    assert fence.epoch == 2
