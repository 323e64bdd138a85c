"""Checkpoints: one atomic unit with one manifest, loadable by Hugging Face as it lies there.

    runs/<name>/checkpoints/step-000100/
        config.json, tokenizer.json, …   copied from the model the run began with
        model.safetensors                the weights under their Hugging Face names
        trainer/                         the backend's exact state
        critic/                          the critic's, if there is one
        history/                         weights of the versions before, if old_logprobs are computed at them
        manifest.json                    digests of all files; offsets, ledger, knobs, epoch, version

    capture   before the weights change  weights and states into a hidden directory, at the speed of the page cache
    commit    any time later             digests, manifest, sync, rename, sync of the parent; what is not kept goes

Both run beside the training, which waits before it changes weights until they are captured. A directory with a final
name is whole, or its digests say that it is not; whatever is partial or damaged is skipped, loudly, as long as an older
one is whole: where none is, the run is refused, and does not begin again as if it had never trained. A trainer that
begins below a damaged one sets that aside, as damaged-e<its epoch>-step-000100: it counts as none and is not removed.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from pipelinerl.errors import CheckpointError, RunFailed
from pipelinerl.system.files import sync, system_words
from pipelinerl.training.checkpoints.copies import CheckpointCopies
from pipelinerl.training.checkpoints.fence import CheckpointFence
from pipelinerl.training.checkpoints.manifest import MANIFEST, Manifest, TrainingState, digest_of
from pipelinerl.training.checkpoints.retention import Retention
from pipelinerl.training.checkpoints.weight_file import write_weights
from trainer_contract.types import ParameterInfo

log = logging.getLogger("pipelinerl")
#: Below every version.
_NONE: Final = -1
#: Before the name of a checkpoint that another of its step replaces.
_REPLACED: Final = ".replaced-"


@dataclass(frozen=True, slots=True)
class Capture:
    """A state that is written and not yet a checkpoint: nothing that is trained from now on changes it."""

    state: TrainingState
    directory: Path


@final
class CheckpointStore:
    """The checkpoints of one run below `directory`: the newest `keep`, and the best `keep_best` (see `Retention`)."""

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
        self._listed: int | None = None
        self._found = _NONE

    @property
    def claimed_epoch(self) -> int:
        """The highest that a trainer ever began here; 0 when none did."""
        return self._fence.epoch

    def claim(self, epoch: int) -> None:
        """Shut out every trainer of an earlier epoch: from now on it neither adds nor removes a checkpoint here.

        Damaged checkpoints above the one that was found are set aside: they are not the newest of what comes now.

        Raises:
            FencedError: a later epoch has claimed the directory.
            CheckpointError: since this store was asked for the latest, the trainer before has made a later one.
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
                log.error("a damaged checkpoint is set aside: %s; look what became of it, then remove it", aside)

    def capture(
        self,
        state: TrainingState,
        *,
        layout: Iterable[ParameterInfo],
        weights: Iterable[tuple[str, Any]],
        parts: Mapping[str, Callable[[Path], None]],
    ) -> Capture:
        """Write weights and states as they are now; a capture that was never committed is dropped.

        Args:
            parts: what writes its state into a directory of its own, by that directory's name.

        Raises:
            FencedError: a later epoch has claimed the directory.
        """
        with self._fence.held(state.epoch):
            for abandoned in self.directory.glob(".*-step-*"):  # of a trainer that was killed or fenced meanwhile
                with _as_far_as_it_goes(abandoned):
                    shutil.rmtree(abandoned)
        temporary = self.directory / f".writing-e{state.epoch}-{_name(state.model_version)}"
        with ExitStack() as undone:
            undone.callback(
                shutil.rmtree, temporary, ignore_errors=True
            )  # should the disk be full, others need the room
            temporary.mkdir(parents=True)
            write_weights(temporary / "model.safetensors", layout, weights)
            for name, save in parts.items():
                (temporary / name).mkdir()
                save(temporary / name)
            undone.pop_all()
        return Capture(state, temporary)

    def commit(self, capture: Capture) -> Path:
        """Make a capture the checkpoint of its step; returns its directory once it is durable.

        What is not kept is removed as far as that goes.

        Raises:
            FencedError: a later epoch has claimed the directory.
            CheckpointError: what was written cannot be forced to the disk; the capture is void.
            OSError: it could not be completed; it may be tried again.
        """
        state, temporary = capture.state, capture.directory
        final_path = self.directory / _name(state.model_version)
        replaced = self.directory / f"{_REPLACED}{final_path.name}"
        in_place = not temporary.exists() and _is_of(final_path, state)  # by a try that failed after that
        if not in_place:
            with self._fence.blamed(state.epoch):
                self._copy_model_files(temporary)
                (temporary / MANIFEST).write_text(Manifest(state, _digests(temporary)).text)
                _sync_tree(temporary)
        with self._fence.held(state.epoch):
            if not in_place:
                if final_path.exists():  # the same step of an abandoned epoch, or of a run that stops where it saved
                    final_path.rename(replaced)
                temporary.rename(final_path)
            sync(self.directory)
            if replaced.exists():
                with _as_far_as_it_goes(replaced):
                    shutil.rmtree(replaced)
            self._prune(state)
        return final_path

    def copy(self, path: Path) -> None:
        """Copy a checkpoint to the run's location, if it has one. Raises as `CheckpointCopies.save` does."""
        if self._copies is not None:
            self._copies.save(path)

    def all(self) -> list[Path]:
        """Directories with a final name, oldest first.

        Raises:
            OSError: the directory is there and cannot be read, which `glob` would pass over as if it were empty.
        """
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        final = (self.directory / name for name in names if name.startswith("step-") and name[5:].isdecimal())
        return sorted((path for path in final if path.is_dir()), key=_version)

    def latest(self) -> tuple[Path, TrainingState] | None:
        """The newest checkpoint that is whole; damaged ones are named in the log and skipped.

        Raises:
            RunFailed: there are checkpoints and none is whole, or nobody may look: a run that has trained must not
                begin again as if it never had.
        """
        try:
            self._put_back()
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
        if paths and self.all() != paths:  # the trainer before is live, and has removed what was being read
            return self.latest()
        if paths:
            raise RunFailed(
                f"no checkpoint in {self.directory} is whole, the newest is {paths[-1].name}: "
                "mend it or put a copy in its place; to begin again from the model's own weights, move them away"
            )
        return None

    def _put_back(self) -> None:
        """A trainer was killed as it replaced the checkpoint of a step: the one before is whole, under another name."""
        for replaced in self.directory.glob(f"{_REPLACED}step-*"):
            with self._fence.held(self._fence.epoch):
                final_path = self.directory / replaced.name.removeprefix(_REPLACED)
                if replaced.exists() and not final_path.exists():
                    replaced.rename(final_path)

    def oldest_kept_offsets(self) -> dict[str, str]:
        """Stream positions before which no checkpoint that is there to go on from would read again."""
        resumable = set(self._retention.resumable(map(_version, self.all())))
        for path in self.all():
            if _version(path) in resumable:
                try:
                    return Manifest.read(path).state.offsets
                except CheckpointError as error:
                    log.error("skipping a damaged checkpoint: %s", error)
        return {}

    def _prune(self, newest: TrainingState) -> None:
        paths = {_version(path): path for path in self.all()}
        for version in paths.keys() - self._retention.survivors(paths, newest.accuracies):
            path = paths[version]
            removed = self.directory / f".removed-{path.name}"  # what is half removed has no final name
            with _as_far_as_it_goes(path):
                shutil.rmtree(path.rename(removed))

    def _copy_model_files(self, target: Path) -> None:
        for source in sorted(self._model_directory.iterdir()):
            weights = source.suffix in {".safetensors", ".bin", ".pt", ".pth"} or source.name.endswith(".index.json")
            if source.is_file() and not weights and source.name != MANIFEST:
                shutil.copyfile(source, target / source.name)


def load(path: Path) -> TrainingState:
    """Verify a checkpoint and return its state.

    Raises:
        CheckpointError: a file is missing, changed or unreadable; the message names it.
    """
    manifest = Manifest.read(path)
    manifest.verify(path)
    return manifest.state


def _is_of(path: Path, state: TrainingState) -> bool:
    """Does the manifest there, if there is one, say that the checkpoint is of this state?"""
    try:
        found = Manifest.read(path)
    except CheckpointError:
        return False
    return Manifest(state, found.files).digest == found.digest


@contextmanager
def _as_far_as_it_goes(path: Path) -> Iterator[None]:
    """Of the removal of what is not kept, none of which is worth a checkpoint: the next ones try again."""
    try:
        yield
    except OSError as error:
        log.error("%s cannot be removed now: %s", path, error)


def _name(version: int) -> str:
    return f"step-{version:06d}"


def _version(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _digests(directory: Path) -> dict[str, str]:
    """Of all files below, but for the manifest of an earlier try."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / MANIFEST)
    return {str(path.relative_to(directory)): digest_of(path) for path in files}


def _sync_tree(directory: Path) -> None:
    """Force everything to the disk.

    Raises:
        CheckpointError: it failed, after which the system may have dropped what it could not write and call the next
            attempt a success.
    """
    try:
        for path in directory.rglob("*"):
            sync(path)
        sync(directory)
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise CheckpointError(f"{directory} cannot be forced to the disk: {error}; look after the disk") from error
