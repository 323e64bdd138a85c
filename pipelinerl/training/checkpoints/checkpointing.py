"""`Checkpointing`: at most one checkpoint on its way beside the training, and the report that it is there.

| stage | waits for | who unblocks it |
|---|---|---|
| begin | the checkpoint before this one | the disk and the location, or whoever makes room there |
| capture | a thread of its own: read the trainer, write | the disk, as above |
| settle | a thread of its own: sync, rename, copy | the disk and the location, as above |

Training stands still for the first alone, and for what of the second the passes of the next step have not covered:
weights and moments are read while they are computed, and changed only when `captured` has returned. What fails for a
reason that may pass (a full disk, an object store that cannot be reached) is said to the controller and tried again;
training goes on meanwhile until the next checkpoint is due, and then waits, since the streams keep all that was trained
after the last durable one. Nothing is lost if it is killed there. After `deadline_s` it gives up; what cannot pass is
raised at once.
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

#: Between two tries: at first, and at most.
_FIRST_RETRY_S: Final = 0.1
_RETRY_S: Final = 5.0
#: Errors that another try meets again. Any other may be the disk's or the network's, whatever a library calls it.
_NEVER_PASS: Final = (CheckpointError, FencedError, AssertionError, AttributeError, LookupError, TypeError)
T = TypeVar("T")


@final
class Checkpointing:
    """Takes states to the disk while training goes on."""

    def __init__(
        self,
        store: CheckpointStore,
        *,
        report: Callable[[ControlMessage], Awaitable[None]],
        trim: Callable[[dict[str, str], int], Awaitable[None]],
        deadline_s: float,
    ) -> None:
        """`trim` is called after each checkpoint: nothing before these stream positions is read again, in its epoch."""
        self._store = store
        self._report = report
        self._trim = trim
        self._deadline_s = deadline_s
        self._under_way: asyncio.Task[None] | None = None
        self._capturing: asyncio.Task[Capture] | None = None
        self._stall_s = 0.0
        self._thread: Future[Any] | None = None

    async def begin(self, state: TrainingState, capture: Callable[[], Capture]) -> None:
        """Begin to capture the state on another thread, once the checkpoint before is durable.

        Raises:
            CheckpointError: the checkpoint before was lost on its way to the disk.
            Exception: what has kept it from succeeding for too long.
        """
        began = time.monotonic()
        await self.finish()
        self._stall_s = time.monotonic() - began
        self._capturing = asyncio.create_task(self._insist(state, lambda: self._beside(capture)))
        self._under_way = asyncio.create_task(self._settle(state, self._capturing))

    async def captured(self) -> None:
        """Wait until nothing more is read of the trainer: its state may change only afterwards. Raises as `begin`."""
        if self._capturing is None:
            return
        began, capturing, self._capturing = time.monotonic(), self._capturing, None
        await asyncio.wait({capturing})
        self._stall_s += time.monotonic() - began
        if capturing.exception() is not None:
            await self.finish()

    async def finish(self) -> None:
        """Wait until what is under way is durable and reported. Raises as `begin` does."""
        if self._under_way is not None:
            task, self._under_way = self._under_way, None
            await task

    async def raise_if_failed(self) -> None:
        """Raise what has ended the checkpoint under way, if anything has."""
        if self._under_way is not None and self._under_way.done():
            await self.finish()

    async def close(self) -> None:
        """Give up what is under way: what is not durable yet does not count."""
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
        """Try until it succeeds."""
        deadline, pause_s = time.monotonic() + self._deadline_s, _FIRST_RETRY_S
        cause: Exception | None = None
        while True:
            trial = asyncio.ensure_future(attempt())
            try:
                await asyncio.wait({trial})
            finally:
                trial.cancel()  # should this be cancelled: a thread that has begun goes on
            error = trial.exception()
            if error is None:
                return trial.result()
            if isinstance(error, _NEVER_PASS) or not isinstance(error, Exception) or time.monotonic() > deadline:
                raise error
            reason = f"{type(error).__name__}: {error}"
            trace = error if cause is None else None  # once is enough
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
