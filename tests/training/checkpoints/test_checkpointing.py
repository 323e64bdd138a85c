"""Checkpoints are written while training continues, reported once they are durable, and retried after errors."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipelinerl.errors import CheckpointError
from pipelinerl.messages import CheckpointDelayed, Checkpointed, ControlMessage
from pipelinerl.training.checkpoints.checkpoint import Checkpointing, CheckpointStore
from pipelinerl.training.checkpoints.copies import CheckpointCopies
from pipelinerl.training.checkpoints.manifest import Retention
from tests.fakes.checkpoints import capture, model_directory, state_of
from tests.patience import PATIENCE_S

DEADLINE_S = PATIENCE_S


@dataclass
class CheckpointedRoom:
    """A checkpoint store, and a record of the reports and of the stream trims that its checkpoints caused."""

    store: CheckpointStore
    saving: Checkpointing
    reports: list[ControlMessage] = field(default_factory=list)
    trimmed: list[dict[str, str]] = field(default_factory=list)

    async def begin(self, version):
        await self.saving.begin(state_of(version), lambda: capture(self.store, state_of(version)))
        await self.saving.captured()

    async def until_reported(self, kind):
        async with asyncio.timeout(DEADLINE_S):
            while not any(isinstance(message, kind) for message in self.reports):
                await asyncio.sleep(0.005)


@asynccontextmanager
async def room(tmp_path, *, deadline_s=DEADLINE_S):
    copies = CheckpointCopies(f"{tmp_path}/location/run", retention=Retention(2))
    model = model_directory(tmp_path / "model")
    store = CheckpointStore(tmp_path / "checkpoints", keep=2, model_directory=model, copies=copies)
    reports = []
    trimmed = []

    async def report(message):
        reports.append(message)

    async def trim(offsets, epoch):
        assert epoch == state_of(1).epoch
        trimmed.append(offsets)

    saving = Checkpointing(store, report=report, trim=trim, deadline_s=deadline_s)
    try:
        yield CheckpointedRoom(store, saving, reports, trimmed)
    finally:
        await saving.close()


async def test_training_continues_while_a_checkpoint_is_written_and_the_next_checkpoint_waits_for_it(
    tmp_path, monkeypatch
):
    real, may_sync = os.fsync, threading.Event()

    def slow(handle):
        assert may_sync.wait(DEADLINE_S)
        real(handle)

    async with room(tmp_path) as made:
        monkeypatch.setattr(os, "fsync", slow)
        await made.begin(1)
        assert (made.reports, made.store.all()) == ([], []), "the state is captured; the disk has not even begun"
        second = asyncio.create_task(made.begin(2))
        await asyncio.sleep(0.05)
        assert not second.done()
        may_sync.set()
        await second
        await made.saving.finish()
        assert [(m.model_version, Path(m.path).name) for m in made.reports if isinstance(m, Checkpointed)] == [
            (1, "step-000001"), (2, "step-000002")
        ]  # fmt: skip
        assert made.trimmed == [state_of(1).offsets, state_of(1).offsets], "the older is still there to go on from"
        assert made.store.latest() == (made.store.all()[-1], state_of(2))


async def test_checkpoint_that_fails_transiently_is_reported_as_delayed_and_retried(tmp_path):
    (tmp_path / "location").write_text("in the way of the directory")
    async with room(tmp_path) as made:
        await made.begin(1)
        await made.until_reported(CheckpointDelayed)
        assert len(made.store.all()) == 1 and not made.trimmed, "the copy is what is missing"
        await made.saving.raise_if_failed()
        (tmp_path / "location").unlink()
        await asyncio.wait_for(made.saving.finish(), DEADLINE_S)
        assert isinstance(made.reports[-1], Checkpointed) and made.trimmed
        assert [path.name.split("-e")[0] for path in (tmp_path / "location" / "run").iterdir()] == ["step-000001"]


async def test_training_waits_for_the_capture_of_a_checkpoint_only_before_it_changes_the_weights(tmp_path):
    state, may_read = state_of(1), threading.Event()

    def reads():
        assert may_read.wait(DEADLINE_S)
        return capture(made.store, state)

    async with room(tmp_path) as made:
        await asyncio.wait_for(made.saving.begin(state, reads), DEADLINE_S)
        waits = asyncio.create_task(made.saving.captured())
        await asyncio.sleep(0)  # lets `waits` start, which then blocks
        began = time.monotonic()
        await asyncio.sleep(0.3)
        assert not waits.done()
        waited_s = time.monotonic() - began
        may_read.set()
        await waits
        await made.saving.finish()
        (report,) = [message for message in made.reports if isinstance(message, Checkpointed)]
        assert waited_s <= report.stall_s < DEADLINE_S
        await made.saving.begin(state_of(2), lambda: capture(made.store, state_of(2)))
        await made.saving.finish()
        await made.saving.captured()
        (_, second) = [message for message in made.reports if isinstance(message, Checkpointed)]
        assert second.stall_s < report.stall_s, "nothing waited for it"


async def test_permanent_failure_to_capture_a_checkpoint_is_raised_to_the_code_that_waits_for_it(tmp_path):
    async with room(tmp_path) as made:
        await made.saving.begin(state_of(1), lambda: capture(made.store, {}))
        with pytest.raises(AttributeError):
            await asyncio.wait_for(made.saving.captured(), DEADLINE_S)
        await made.saving.finish()


async def test_transient_failure_to_capture_a_checkpoint_blocks_training_until_a_retry_succeeds(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way of the directory")
    async with room(tmp_path) as made:
        beginning = asyncio.create_task(made.begin(1))
        await made.until_reported(CheckpointDelayed)
        assert not beginning.done()
        (tmp_path / "checkpoints").unlink()
        await asyncio.wait_for(beginning, DEADLINE_S)
        await made.saving.finish()
        (last,) = [message for message in made.reports if isinstance(message, Checkpointed)]
        assert last.stall_s > 0


async def test_checkpoint_that_is_not_written_by_its_deadline_fails_with_the_reason(tmp_path):
    (tmp_path / "location").write_text("in the way of the directory")
    async with room(tmp_path, deadline_s=0.05) as made:
        await made.begin(1)
        with pytest.raises(OSError, match="location"):
            await asyncio.wait_for(made.saving.finish(), DEADLINE_S)


async def test_checkpoint_whose_fsync_fails_is_not_retried(tmp_path, monkeypatch):
    def broken(_):
        raise OSError(5, "Input/output error")

    async with room(tmp_path) as made:
        await made.begin(1)
        await made.saving.finish()
        monkeypatch.setattr(os, "fsync", broken)
        await made.begin(2)
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(CheckpointError, match=r"cannot be forced to the disk.*Input/output error"):
                while True:
                    await made.saving.raise_if_failed()
                    await asyncio.sleep(0.005)
        assert made.store.latest() == (made.store.all()[-1], state_of(1))
        assert not list(made.store.directory.glob(".*"))


async def test_closing_the_background_checkpointing_cancels_the_checkpoint_in_progress(tmp_path):
    (tmp_path / "location").write_text("in the way of the directory")
    async with room(tmp_path) as made:
        await made.begin(1)
        await made.until_reported(CheckpointDelayed)
        await asyncio.wait_for(made.saving.close(), DEADLINE_S)
        assert not any(isinstance(message, Checkpointed) for message in made.reports)
