"""A full disk: the trainer pauses, says why, and continues once there is space; nothing is lost or damaged."""

import json
import resource
import subprocess
import sys

import pytest

from pipelinerl import rng
from pipelinerl.training.checkpoints.checkpoint import CheckpointStore, load
from tests.fakes import small_disk
from tests.fakes.checkpoints import model_directory, save, state_of, versions_in
from tests.patience import PATIENCE_S

SEED = 0


def run_on_small_disk(directory, *, rounds):
    """Perform a run whose checkpoint disk becomes full `rounds` times; return its final report."""
    checkpoints = directory / "checkpoints"
    if reason := small_disk.why_not(checkpoints):
        pytest.skip(f"no small disk may be mounted here ({reason}); the test of a file size limit stands in for it")
    words = [sys.executable, "-m", "tests.fakes.run_on_small_disk", str(directory), str(rounds)]
    done = subprocess.run(
        [*small_disk.command(checkpoints, size="400k"), *words], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def assert_paused_and_went_on(report, *, rounds):
    steps = 10 * (rounds + 2)
    assert report["finished"] == "run_finished"
    assert report["steps"] == list(range(1, steps + 1)), "no step was lost, none was taken twice"
    assert report["checkpoints"] == list(range(10, steps + 1, 10)), "every checkpoint was made in the end"
    assert len(report["pauses"]) == rounds and len(report["delayed"]) >= rounds
    for pause in report["pauses"]:
        assert pause["version"] % 10 == 0, "it pauses where the checkpoint is due"
        assert f"the checkpoint of step {pause['version']} cannot be written yet" in pause["waits_for"]
        assert "No space left on device" in pause["waits_for"]
    assert report["unloadable"] == []
    ledger = report["ledger"]
    assert ledger["trained"] == steps * 8
    assert ledger["issued"] == sum(count for outcome, count in ledger.items() if outcome != "issued")


def test_run_pauses_while_the_disk_is_full_and_continues(tmp_path):
    assert_paused_and_went_on(run_on_small_disk(tmp_path, rounds=1), rounds=1)


@pytest.mark.chaos
@pytest.mark.parametrize("run", range(10))
def test_run_survives_a_disk_that_becomes_full_repeatedly(tmp_path, run):
    assert_paused_and_went_on(run_on_small_disk(tmp_path / str(run), rounds=2), rounds=2)


def test_earlier_checkpoints_survive_a_disk_that_is_full_at_any_byte_of_a_save(tmp_path):
    """A limit on file sizes stands in for the full disk; it is reached at twenty places within a checkpoint."""
    store = CheckpointStore(tmp_path / "checkpoints", keep=2, model_directory=model_directory(tmp_path / "model"))
    padding = 2**16
    save(store, 1, padding=padding)
    sizes = [file.stat().st_size for file in store.all()[0].rglob("*") if file.is_file()]
    limits = rng.generator(SEED, "limits").integers(0, max(sizes), 20).tolist()
    print(f"seed {SEED}: files limited to {limits} bytes")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for version, limit in enumerate(limits, start=2):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            with pytest.raises(OSError, match="File too large"):
                save(store, version, padding=padding)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        path, state = store.latest() or pytest.fail("nothing is left")
        assert state == state_of(version - 1) and versions_in(path, state) == {version - 1}
        assert not (store.directory / f"step-{version:06d}").exists()
        assert load(save(store, version, padding=padding)) == state_of(version), "with room, it is made"
