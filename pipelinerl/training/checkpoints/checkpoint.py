"""Atomic checkpoints with one manifest; Hugging Face can load the directory directly.

    runs/<name>/checkpoints/step-000100/
        config.json, tokenizer.json, …   copied from the model that the run started from
        model.safetensors                the tensors of that model, with the same names, shapes and dtypes
        trainer/                         the backend's exact state
        critic/                          the critic's exact state, if there is a critic
        history/                         weights of earlier versions, if old_logprobs are computed with them
        manifest.json                    digests of all files, and the `TrainingState`: version, epoch, offsets, …

    capture   before the weights change  write weights and states to a hidden directory, at page-cache speed
    commit    any time later             digest, manifest, sync, rename, sync the parent, prune

Both stages run in parallel with training, which waits only for the capture before it changes weights. An epoch is one
incarnation of the trainer; later epochs fence earlier ones. Partial and damaged checkpoints are skipped with an error
in the log. If checkpoints exist but none is complete, the run fails, so that it cannot silently restart from scratch. A
trainer that resumes from an older checkpoint renames damaged newer ones to damaged-e<its epoch>-step-000100; these are
never removed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from filelock import FileLock, Timeout

from pipelinerl.errors import CheckpointError, DeadlineError, FencedError, RunFailed
from pipelinerl.messages import CheckpointDelayed, Checkpointed, ControlMessage
from pipelinerl.models.directory_copy import copy_model_files
from pipelinerl.models.weight_writer import WeightWriter
from pipelinerl.system.background import in_background, settled
from pipelinerl.system.files import sync, system_words
from pipelinerl.training.checkpoints.copies import CheckpointCopies
from pipelinerl.training.checkpoints.manifest import (
    MANIFEST,
    Manifest,
    Retention,
    TrainingState,
    digest_of,
)
from trainer_contract.types import ParameterInfo

log = logging.getLogger("pipelinerl")
T = TypeVar("T")
#: Version that stands for "no checkpoint"; lower than every real version.
_NONE: Final = -1
#: Prefix of a checkpoint's name while a new checkpoint of the same step replaces it.
_REPLACED: Final = ".replaced-"


@dataclass(frozen=True, slots=True)
class Capture:
    """A copy of the training state in the hidden `directory`, which `commit` turns into a checkpoint."""

    state: TrainingState
    directory: Path


class CheckpointStore:
    """The checkpoints of one run in `directory`: the newest `keep`, and the `keep_best` with the highest accuracy."""

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        model_directory: Path,
        keep_best: int = 0,
        copies: CheckpointCopies | None = None,
    ) -> None:
        self.directory = directory
        self._retention = Retention(keep, keep_best)
        self._model_directory = model_directory
        self._copies = copies
        self._fence = CheckpointFence(directory)
        self._writer: WeightWriter | None = None
        self._listed: int | None = None
        self._found = _NONE

    @property
    def claimed_epoch(self) -> int:
        """The highest epoch that a trainer has claimed in this directory; 0 if none has."""
        return self._fence.epoch

    def claim(self, epoch: int) -> None:
        """Exclude trainers of earlier epochs, and rename damaged checkpoints newer than the one that `latest` returned.

        Raises:
            FencedError: a later epoch has claimed the directory.
            CheckpointError: the previous trainer has added a checkpoint since this store called `latest`.
        """
        self._fence.claim(epoch)
        if self._listed is None:
            return
        with self._fence.held(epoch):
            above = [path for path in self.all() if _version(path) > self._found]
            if above and _version(above[-1]) > self._listed:
                begun = "the beginning" if self._found == _NONE else _name(self._found)
                raise CheckpointError(
                    f"{above[-1]} appeared while this trainer began from {begun}; start it again, from there"
                )
            for path in above:
                aside = path.rename(self.directory / f"damaged-e{epoch}-{path.name}")
                log.error("a damaged checkpoint was moved to %s; inspect it, then remove it", aside)

    def prepare(self, layout: Iterable[ParameterInfo]) -> WeightWriter:
        """Return the weights' writer; called first, as ModelError says that the directory cannot hold them."""
        if self._writer is None:
            self._writer = WeightWriter.of(self._model_directory, layout)
        return self._writer

    def capture(
        self,
        state: TrainingState,
        *,
        layout: Iterable[ParameterInfo],
        weights: Iterable[tuple[str, Any]],
        parts: Mapping[str, Callable[[Path], None]],
    ) -> Capture:
        """Write the weights, and let each function in `parts` fill the subdirectory of its name. Raises FencedError."""
        with self._fence.held(state.epoch):
            # Remove the unfinished directories of trainers that were killed or fenced.
            for abandoned in self.directory.glob(".*-step-*"):
                with _log_failed_removal(abandoned):
                    shutil.rmtree(abandoned)
        temporary = self.directory / f".writing-e{state.epoch}-{_name(state.model_version)}"
        with ExitStack() as undone:
            # After an error, such as a full disk, free the space.
            undone.callback(shutil.rmtree, temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            self.prepare(layout).write(temporary / "model.safetensors", weights)
            for name, save in parts.items():
                (temporary / name).mkdir()
                save(temporary / name)
            undone.pop_all()
        return Capture(state, temporary)

    def commit(self, capture: Capture) -> Path:
        """Make a capture the checkpoint of its step, and prune old ones; return the durable checkpoint's directory.

        Raises:
            FencedError: a later epoch has claimed the directory.
            CheckpointError: syncing to disk failed; the capture is lost.
            OSError: the commit failed; it can be retried.
        """
        state, temporary = capture.state, capture.directory
        final_path = self.directory / _name(state.model_version)
        replaced = self.directory / f"{_REPLACED}{final_path.name}"
        # True if an earlier attempt failed after the rename.
        in_place = not temporary.exists() and _is_of(final_path, state)
        if not in_place:
            self._fence.check(state.epoch)
            try:
                copy_model_files(self._model_directory, temporary)
                files = sorted(path for path in temporary.rglob("*") if path.is_file() and path != temporary / MANIFEST)
                digests = {str(path.relative_to(temporary)): digest_of(path) for path in files}
                (temporary / MANIFEST).write_text(Manifest(state, digests).text)
                _sync_tree(temporary)
            except (OSError, CheckpointError):
                self._fence.check(state.epoch)  # a later trainer may have removed files and so caused the failure
                raise
        with self._fence.held(state.epoch):
            if not in_place:
                if final_path.exists():
                    # An earlier trainer, since replaced, or this run before it stopped has already saved this step.
                    final_path.rename(replaced)
                temporary.rename(final_path)
            sync(self.directory)
            if replaced.exists():
                with _log_failed_removal(replaced):
                    shutil.rmtree(replaced)
            self._prune(state)
        return final_path

    def copy(self, path: Path) -> None:
        """Copy a checkpoint to the run's remote location, if any. Raises the errors of `CheckpointCopies.save`."""
        if self._copies is not None:
            self._copies.save(path)

    def all(self) -> list[Path]:
        """Return the directories of all committed checkpoints, oldest first. Raises OSError if listing fails."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        final = (self.directory / name for name in names if name.startswith("step-") and name[5:].isdecimal())
        return sorted((path for path in final if path.is_dir()), key=_version)

    def latest(self) -> tuple[Path, TrainingState] | None:
        """Return the newest complete checkpoint, or None if there are none. Raises RunFailed if all are damaged."""
        try:
            # If a checkpoint was renamed to make room for a new one that was never written, give it its name back.
            for replaced in self.directory.glob(f"{_REPLACED}step-*"):
                with self._fence.held(self._fence.epoch):
                    final_path = self.directory / replaced.name.removeprefix(_REPLACED)
                    if replaced.exists() and not final_path.exists():
                        replaced.rename(final_path)
            paths = self.all()
        except OSError as error:
            raise RunFailed(f"the run's checkpoints cannot be read: {system_words(error)}") from None
        self._listed, self._found = max(map(_version, paths), default=_NONE), _NONE
        for path in reversed(paths):
            try:
                state = load(path)
            except CheckpointError as error:
                log.error("skipping a damaged checkpoint: %s", error)
            else:
                self._found = _version(path)
                return path, state
        if paths and self.all() != paths:
            # The previous trainer is still alive and has pruned checkpoints in the meantime.
            return self.latest()
        if paths:
            raise RunFailed(
                f"no checkpoint in {self.directory} is whole, the newest is {paths[-1].name}: "
                "mend it or put a copy in its place; to begin again from the model's own weights, move them away"
            )
        return None

    def start_from_newest(
        self, start: Callable[[Path | None, int], T], *, attempts: int = 5
    ) -> tuple[TrainingState | None, T]:
        """Call `start` with the newest checkpoint and its version, or (None, 0); return its state and the result. If a
        trainer that is still alive removes the checkpoint meanwhile, take the next newest. Raises CheckpointError after
        `attempts`.
        """
        while True:
            latest, attempts = self.latest(), attempts - 1
            try:
                if latest is None:
                    return None, start(None, 0)
                return latest[1], start(latest[0], latest[1].model_version)
            except Exception as error:  # whatever a library raises for files that vanish
                if latest is not None and not latest[0].is_dir():
                    removed = f"{latest[0]} was removed while this trainer loaded it, since another one is alive"
                    if not attempts:
                        raise CheckpointError(
                            f"{removed}; start this trainer again, and it loads the newest one"
                        ) from error
                    log.warning("%s; loading the newest one", removed)
                    continue
                raise

    def rewind(self, epoch: int, version: int) -> int | None:
        """Rename all checkpoints after the newest one up to `version`, or after the oldest; return that one's version.

        They become rewound-e<epoch>-step-000100, which are never removed. None without checkpoints. Raises FencedError.
        """
        with self._fence.held(epoch):
            paths = self.all()
            good = [_version(path) for path in paths if _version(path) <= version] or [*map(_version, paths[:1])]
            for path in paths:
                if _version(path) > good[-1]:
                    aside = path.rename(self.directory / f"rewound-e{epoch}-{path.name}")
                    log.warning("%s is abandoned, and kept as %s", path.name, aside)
            sync(self.directory)
        return good[-1] if good else None

    def oldest_kept_offsets(self, *, good: int | None = None) -> dict[str, str]:
        """Return the stream positions of the oldest intact checkpoint to resume from (`Retention`), or {}."""
        resumable = set(self._retention.resumable(map(_version, self.all()), good=good))
        for path in self.all():
            if _version(path) in resumable:
                try:
                    return Manifest.read(path).state.offsets
                except CheckpointError as error:
                    log.error("skipping a damaged checkpoint: %s", error)
        return {}

    def _prune(self, newest: TrainingState) -> None:
        paths = {_version(path): path for path in self.all()}
        for version in paths.keys() - self._retention.survivors(paths, newest.accuracies, good=newest.good_version):
            path = paths[version]
            removed = self.directory / f".removed-{path.name}"  # a partly removed checkpoint must not count as one
            with _log_failed_removal(path):
                shutil.rmtree(path.rename(removed))


def load(path: Path) -> TrainingState:
    """Verify a checkpoint and return its state. Raises CheckpointError if a file is missing or has changed."""
    manifest = Manifest.read(path)
    manifest.verify(path)
    return manifest.state


def _is_of(path: Path, state: TrainingState) -> bool:
    try:
        saved = Manifest.read(path)
    except CheckpointError:
        return False
    return Manifest(state, saved.files).digest == saved.digest


@contextmanager
def _log_failed_removal(path: Path) -> Iterator[None]:
    """Log a failed removal in the block instead of raising; later checkpoints retry the removal."""
    try:
        yield
    except OSError as error:
        log.error("%s cannot be removed now: %s", path, error)


def _name(version: int) -> str:
    return f"step-{version:06d}"


def _version(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _sync_tree(directory: Path) -> None:
    """Sync all files and directories to disk; on failure, remove `directory` and raise CheckpointError.

    Retrying is unsafe: the system may have dropped unwritten data, and a second sync may wrongly report success.
    """
    try:
        for path in directory.rglob("*"):
            sync(path)
        sync(directory)
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise CheckpointError(f"{directory} cannot be forced to the disk: {error}; look after the disk") from error


_POLL_S: Final = 0.02


class CheckpointFence:
    """The lock and the claimed epoch of a checkpoint directory; together they exclude trainers of earlier epochs."""

    def __init__(self, directory: Path, *, deadline_s: float = 120.0) -> None:
        self._directory = directory
        self._claim = directory.with_name(f"{directory.name}.epoch")
        self._lock = directory.with_name(f"{directory.name}.lock")
        self._deadline_s = deadline_s

    @property
    def epoch(self) -> int:
        """The latest epoch that has claimed the directory; 0 before the first claim."""
        try:
            return int(self._claim.read_text())
        except FileNotFoundError:
            return 0

    def check(self, epoch: int) -> None:
        if self.epoch > epoch:
            raise FencedError(
                f"epoch {self.epoch} has taken over the checkpoints in {self._directory} from epoch {epoch}: another "
                "trainer is running; this one stops"
            )

    def claim(self, epoch: int) -> None:
        """Claim the directory for `epoch`, which excludes all earlier epochs. Raises the errors of `held`."""
        with self.held(epoch):
            draft = self._claim.with_name(f"{self._claim.name}.new")
            with draft.open("w") as file:
                file.write(str(epoch))
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._claim)

    @contextmanager
    def held(self, epoch: int) -> Iterator[None]:
        """Exclude other trainers in the block. Raises FencedError (later epoch), DeadlineError (lock)."""
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        # No fallback: filelock could use a plain lock file, which would remain after its holder on another machine
        # died.
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


# --- writing in parallel with training --------------------------------------------------------------------------------
#
# | stage | waits for | who unblocks it |
# |---|---|---|
# | begin | the previous checkpoint | the disk and the remote location, or an operator who frees space there |
# | capture | a separate thread: read the trainer's state, write it | the disk, as above |
# | settle | a separate thread: sync, rename, copy | the disk and the remote location, as above |
#
# Training waits for the first stage, and for the capture if it takes longer than the next step's passes. The capture
# reads weights and moments during these passes; they may change only after `captured` has returned.
#
# Transient failures (a full disk, an unreachable object store) are reported to the controller and retried until
# `deadline_s`. Meanwhile training continues until the next checkpoint is due, then waits. If the trainer is killed,
# nothing is lost, since streams keep everything after the last durable checkpoint. Permanent errors are raised
# immediately.

#: First and longest pause between two attempts to write a checkpoint, in seconds.
_FIRST_RETRY_S: Final = 0.1
_RETRY_S: Final = 5.0
#: Errors that are not retried. Any other error may come from the disk or the network, since libraries raise various
#: types.
_NEVER_PASS: Final = (CheckpointError, FencedError, AssertionError, AttributeError, LookupError, TypeError)


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
        """Create a writer; it calls `trim` with the positions that no checkpoint needs, and the epoch."""
        self.store = store
        self.version: int | None = None
        """The version of the last checkpoint that was begun."""
        self._report = report
        self._trim = trim
        self._deadline_s = deadline_s
        self._under_way: asyncio.Task[None] | None = None
        self._capturing: asyncio.Task[Capture] | None = None
        self._stall_s = 0.0
        self._thread: Future[Any] | None = None

    async def begin(self, state: TrainingState, capture: Callable[[], Capture]) -> None:
        """Wait until the previous checkpoint is durable (or raise its error), then start `capture` on a thread."""
        began = time.monotonic()
        await self.finish()
        self.version = state.model_version
        self._stall_s = time.monotonic() - began
        self._capturing = asyncio.create_task(self._retry(state, capture))
        self._under_way = asyncio.create_task(self._settle(state, self._capturing))

    async def captured(self) -> None:
        """Wait until the capture no longer reads the trainer; its state may then change. Raises the capture's error."""
        if self._capturing is None:
            return
        began, capturing, self._capturing = time.monotonic(), self._capturing, None
        await asyncio.wait({capturing})
        self._stall_s += time.monotonic() - began
        if capturing.exception() is not None:
            await self.finish()

    async def finish(self) -> None:
        if self._under_way is not None:
            task, self._under_way = self._under_way, None
            await task

    async def raise_if_failed(self) -> None:
        if self._under_way is not None and self._under_way.done():
            await self.finish()

    async def close(self) -> None:
        if self._under_way is not None:
            self._under_way.cancel()
            await asyncio.gather(self._under_way, return_exceptions=True)
        if self._thread is not None:
            await settled(self._thread, timeout_s=_RETRY_S)

    async def _settle(self, state: TrainingState, capturing: Awaitable[Capture]) -> None:
        captured = await capturing
        path = await self._retry(state, lambda: self.store.commit(captured))
        await self._retry(state, lambda: self.store.copy(path))
        kept = await self._on_thread(lambda: self.store.oldest_kept_offsets(good=state.good_version))
        await self._trim(kept, state.epoch)
        await self._report(
            Checkpointed(epoch=state.epoch, model_version=state.model_version, path=str(path), stall_s=self._stall_s)
        )

    async def _retry(self, state: TrainingState, attempt: Callable[[], T]) -> T:
        deadline, pause_s = time.monotonic() + self._deadline_s, _FIRST_RETRY_S
        cause: Exception | None = None
        while True:
            trial = asyncio.ensure_future(self._on_thread(attempt))
            try:
                await asyncio.wait({trial})
            finally:
                trial.cancel()  # matters only if this task is cancelled; a thread that has started continues
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

    async def _on_thread(self, call: Callable[[], T]) -> T:
        self._thread = thread = in_background("checkpoint", call)
        return await asyncio.wrap_future(thread)
