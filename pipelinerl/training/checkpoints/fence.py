"""`CheckpointFence`: only the trainer with the highest claimed epoch may change a directory's checkpoints.

    checkpoints.epoch   the claim, a number        checkpoints.lock   held while a claim or a checkpoint is put in place

A trainer claims the directory when its epoch begins. From then on no trainer of an earlier epoch can put a checkpoint
in place or remove one, even if it was suspended for long or continues on another machine. Check and change happen under
one lock, which the kernel releases when its holder dies. The lock works between all machines that mount the directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

from filelock import FileLock, Timeout

from pipelinerl.errors import CheckpointError, DeadlineError, FencedError

_POLL_S: Final = 0.02


@final
class CheckpointFence:
    """Fence of one directory, which need not exist before it is claimed."""

    def __init__(self, directory: Path, *, deadline_s: float = 120.0) -> None:
        self._directory = directory
        self._claim = directory.with_name(f"{directory.name}.epoch")
        self._lock = directory.with_name(f"{directory.name}.lock")
        self._deadline_s = deadline_s

    @property
    def epoch(self) -> int:
        """The claimed epoch; 0 before the first claim."""
        try:
            return int(self._claim.read_text())
        except FileNotFoundError:
            return 0

    def check(self, epoch: int) -> None:
        """Raise FencedError if a later epoch has claimed the directory."""
        if self.epoch > epoch:
            raise FencedError(
                f"epoch {self.epoch} has taken over the checkpoints in {self._directory} from epoch {epoch}: another "
                "trainer is running; this one stops"
            )

    def claim(self, epoch: int) -> None:
        """Fence off every earlier epoch. Raises like `held`."""
        with self.held(epoch):
            draft = self._claim.with_name(f"{self._claim.name}.new")
            with draft.open("w") as file:
                file.write(str(epoch))
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._claim)

    @contextmanager
    def blamed(self, epoch: int) -> Iterator[None]:
        """Raise FencedError instead of an error caused by a later epoch that has removed files used in the block."""
        self.check(epoch)
        try:
            yield
        except (OSError, CheckpointError):
            self.check(epoch)
            raise

    @contextmanager
    def held(self, epoch: int) -> Iterator[None]:
        """Prevent other trainers from changing the directory during the block.

        Raises:
            FencedError: a later epoch has claimed the directory.
            DeadlineError: another process holds the lock for too long.
        """
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        # filelock can fall back to a plain lock file, which would outlive a holder on another machine.
        lock = FileLock(self._lock, self._deadline_s, mode=0o600, poll_interval=_POLL_S, fallback_to_soft=False)
        try:
            held = lock.acquire()
        except Timeout:
            raise DeadlineError(
                f"another process has held {self._lock} for {self._deadline_s:g} s; look which one it is, and end it "
                "if it is stopped"
            ) from None
        with held:
            self.check(epoch)
            yield
