"""`Checkpointing`: write at most one checkpoint at a time in parallel with training, and report when it is durable.

| stage | waits for | who unblocks it |
|---|---|---|
| begin | the previous checkpoint | the disk and the remote location, or an operator who frees space there |
| capture | a separate thread: read the trainer's state, write it | the disk, as above |
| settle | a separate thread: sync, rename, copy | the disk and the remote location, as above |

Training blocks on the first stage, and on the part of the capture that the next step's passes do not overlap. The
capture reads weights and moments during these passes; they may change only after `captured` has returned.

Transient failures (a full disk, an unreachable object store) are reported to the controller and retried. Training
continues until the next checkpoint is due and then waits: the streams keep everything that was trained after the last
durable checkpoint, so a kill loses nothing. After `deadline_s` the checkpoint fails. Permanent errors are raised at
once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar, final

from pipelinerl.errors import CheckpointError, FencedError
from pipelinerl.messages import CheckpointDelayed, Checkpointed, ControlMessage
from pipelinerl.system.background import in_background, settled
from pipelinerl.training.checkpoints.checkpoint import Capture, CheckpointStore
from pipelinerl.training.checkpoints.manifest import TrainingState

log = logging.getLogger("pipelinerl")

#: First and longest pause between two attempts.
_FIRST_RETRY_S: Final = 0.1
_RETRY_S: Final = 5.0
#: Errors that a retry cannot fix. Any other may come from the disk or the network, whatever type a library raises.
_NEVER_PASS: Final = (CheckpointError, FencedError, AssertionError, AttributeError, LookupError, TypeError)
T = TypeVar("T")


@final
class Checkpointing:
    """Writer of checkpoints in parallel with training."""

    def __init__(
        self,
        store: CheckpointStore,
        *,
        report: Callable[[ControlMessage], Awaitable[None]],
        trim: Callable[[dict[str, str], int], Awaitable[None]],
        deadline_s: float,
    ) -> None:
        """Create a writer for one trainer.

        Args:
            report: sends a message to the controller.
            trim: called after each checkpoint with stream positions and the epoch; that epoch never reads before them.
            deadline_s: longest time to retry a failing checkpoint.
        """
        self._store = store
        self._report = report
        self._trim = trim
        self._deadline_s = deadline_s
        self._under_way: asyncio.Task[None] | None = None
        self._capturing: asyncio.Task[Capture] | None = None
        self._stall_s = 0.0
        self._thread: Future[Any] | None = None

    async def begin(self, state: TrainingState, capture: Callable[[], Capture]) -> None:
        """Start capturing the state on another thread, once the previous checkpoint is durable.

        Raises:
            CheckpointError: the previous checkpoint was lost while it was written.
            Exception: the error that made the previous checkpoint fail until its deadline.
        """
        began = time.monotonic()
        await self.finish()
        self._stall_s = time.monotonic() - began
        self._capturing = asyncio.create_task(self._insist(state, lambda: self._beside(capture)))
        self._under_way = asyncio.create_task(self._settle(state, self._capturing))

    async def captured(self) -> None:
        """Wait until the capture no longer reads the trainer; only then may its state change. Raises like `begin`."""
        if self._capturing is None:
            return
        began, capturing, self._capturing = time.monotonic(), self._capturing, None
        await asyncio.wait({capturing})
        self._stall_s += time.monotonic() - began
        if capturing.exception() is not None:
            await self.finish()

    async def finish(self) -> None:
        """Wait until the current checkpoint is durable and reported. Raises like `begin`."""
        if self._under_way is not None:
            task, self._under_way = self._under_way, None
            await task

    async def raise_if_failed(self) -> None:
        """Raise the error of the current checkpoint, if it has failed."""
        if self._under_way is not None and self._under_way.done():
            await self.finish()

    async def close(self) -> None:
        """Abandon the current checkpoint; it does not count unless it is durable already."""
        if self._under_way is not None:
            self._under_way.cancel()
            await asyncio.gather(self._under_way, return_exceptions=True)
        if self._thread is not None:
            await settled(self._thread, timeout_s=_RETRY_S)

    async def _settle(self, state: TrainingState, capturing: Awaitable[Capture]) -> None:
        captured = await capturing
        path = await self._insist(state, lambda: self._beside(lambda: self._store.commit(captured)))
        await self._insist(state, lambda: self._beside(lambda: self._store.copy(path)))
        await self._trim(await self._beside(self._store.oldest_kept_offsets), state.epoch)
        await self._report(
            Checkpointed(epoch=state.epoch, model_version=state.model_version, path=str(path), stall_s=self._stall_s)
        )

    async def _insist(self, state: TrainingState, attempt: Callable[[], Awaitable[T]]) -> T:
        """Retry until the attempt succeeds, fails permanently, or passes the deadline."""
        deadline, pause_s = time.monotonic() + self._deadline_s, _FIRST_RETRY_S
        cause: Exception | None = None
        while True:
            trial = asyncio.ensure_future(attempt())
            try:
                await asyncio.wait({trial})
            finally:
                trial.cancel()  # matters if this task is cancelled; a thread that has started continues
            error = trial.exception()
            if error is None:
                return trial.result()
            if isinstance(error, _NEVER_PASS) or not isinstance(error, Exception) or time.monotonic() > deadline:
                raise error
            reason = f"{type(error).__name__}: {error}"
            trace = error if cause is None else None  # log the traceback only once
            log.error(
                "the checkpoint of step %d cannot be written yet: %s", state.model_version, reason, exc_info=trace
            )
            cause = error
            await self._report(CheckpointDelayed(epoch=state.epoch, model_version=state.model_version, reason=reason))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _RETRY_S)

    async def _beside(self, call: Callable[[], T]) -> T:
        self._thread = thread = in_background("checkpoint", call)
        return await asyncio.wrap_future(thread)
