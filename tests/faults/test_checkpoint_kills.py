"""Trainers killed while they save: every checkpoint is complete, has the weights of one version, and none is lost."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from pipelinerl import rng
from pipelinerl.training.checkpoints.checkpoint import load
from tests.fakes.checkpoints import versions_in
from tests.fakes.saving_process import store_in
from tests.patience import PATIENCE_S

SEED = 0
DEADLINE_S = PATIENCE_S


@contextmanager
def nursery(directory):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.saving_process", str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # kill the whole process group, so that the trainers die too
        process.communicate()


def answer(process):
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def kill_while_saving(directory, *, kills, seed):
    """Let one trainer after another save for a random time, enough for zero to three checkpoints, then kill it."""
    directory.mkdir(parents=True)
    waits = rng.generator(seed, "kills").uniform(0.0, 3.0, kills)
    with nursery(directory) as process:
        store, _ = store_in(directory)
        child = int(answer(process))
        seen = {}
        deadline = time.monotonic() + DEADLINE_S
        while 3 not in seen:
            assert time.monotonic() < deadline, "the trainer saves nothing"
            for path in store.all():
                seen.setdefault(int(path.name[5:]), time.monotonic())
            time.sleep(0.001)
        one_s = (seen[3] - min(seen.values())) / (3 - min(seen))
        newest = cut_off = 0
        for number, wait in enumerate(waits.tolist()):
            time.sleep(wait * one_s)
            os.kill(child, signal.SIGKILL)
            assert answer(process) == "collected"
            halves = [f for f in (directory / "location").glob("step-*") if not (f / "manifest.json").is_file()]
            cut_off += any(store.directory.glob(".*-step-*")) or bool(halves)
            before, newest = newest, newest_whole(directory, directory / f"fetched-{number}")
            assert before <= newest, "lost"
            child = int(answer(process))
    print(f"seed {seed}: {kills} kills, {cut_off} in the middle of a checkpoint or a copy, up to version {newest}")
    assert newest >= 3 and cut_off >= kills // 10, "few were killed at what this is about"


def newest_whole(directory, into):
    """Return the newest version; assert that each checkpoint and the newest copy is complete and of one version."""
    store, copies = store_in(directory)
    for path in store.all():
        state = load(path)  # raises if the checkpoint cannot be loaded
        assert versions_in(path, state) == {state.model_version}, "mixed"
    for copy in copies.newest():
        copies.fetch(copy, into)
        assert versions_in(into, copy.manifest.state) == {copy.manifest.state.model_version}, "mixed"
        break
    newest = store.latest()
    return newest[1].model_version if newest else 0


def test_trainer_killed_while_saving_leaves_only_complete_checkpoints(tmp_path):
    kill_while_saving(tmp_path / "run", kills=25, seed=SEED)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_two_hundred_trainers_killed_while_saving_leave_only_complete_checkpoints(tmp_path):
    kill_while_saving(tmp_path / "run", kills=200, seed=SEED + 1)
