"""`CheckpointCopies`: copies of a run's checkpoints at a remote location, from which any machine can resume the run.

    <location>/<run>/step-000100-e1-5f0c9a1e/     version, epoch, and the first digits of the manifest's digest; if
                                                  epoch 1 saves a version again: -e1-2-…, -e1-3-… and so on
        …                                         as in the run's directory
        run/recipe.toml, run/events.jsonl         the other files needed to resume the run and to report on it
        manifest.json                             written last; without it the folder is not a checkpoint

The location is a directory, or any URL that fsspec supports. Object stores cannot rename, so each upload has its own
folder, which counts only when it has a manifest. All methods block until they are done.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipelinerl.errors import CheckpointError, FencedError
from pipelinerl.observability.logs import without_secrets
from pipelinerl.system.storage import Storage
from pipelinerl.training.checkpoints.manifest import (
    MANIFEST,
    Manifest,
    Retention,
    TrainingState,
    digest_of,
    digest_of_bytes,
)

log = logging.getLogger("pipelinerl")

_FOLDER: Final = re.compile(r"step-(\d+)-e(\d+)(?:-(\d+))?-[0-9a-f]{8}")
#: Name of the folder, inside a copy, of the files that describe the run.
RUN: Final = "run"


@dataclass(frozen=True, slots=True)
class Copy:
    """A checkpoint at the remote location, identified by its manifest."""

    folder: str
    manifest: Manifest

    @property
    def name(self) -> str:
        return self.folder.split("-e")[0]


class CheckpointCopies:
    """The copies of a run's checkpoints below `url`, with `run_files` without secrets; for one trainer."""

    def __init__(self, url: str, *, retention: Retention, run_files: Sequence[Path] = ()) -> None:
        self.url = url
        self._place = Storage(url)
        self._retention = retention
        self._run_files = run_files

    def save(self, path: Path) -> None:
        """Copy the checkpoint in the directory `path` and prune old copies; the copy is durable on return.

        Raises:
            CheckpointError: the checkpoint has no manifest.
            FencedError: a trainer of a later epoch copies here.
            OSError: the copy failed (the URL's library may raise other errors, too); the call can be retried.
        """
        local = Manifest.read(path)
        self._raise_if_fenced(local.state)
        folder = self._folder_of(f"{path.name}-e{local.state.epoch}", local.digest[:8])
        if not self._place.has(f"{folder}/{MANIFEST}"):
            of_run = {f"{RUN}/{file.name}": _without_secrets(file) for file in self._run_files if file.is_file()}
            for name in local.files:
                self._place.upload(path / name, f"{folder}/{name}")
            for name, data in of_run.items():
                self._place.write(f"{folder}/{name}", data)
            digests = {name: digest_of_bytes(data) for name, data in of_run.items()}
            text = Manifest(local.state, local.files | digests).text
            self._place.write(f"{folder}/{MANIFEST}", text.encode())
        self._prune(local.state)

    def newest(self) -> Iterator[Copy]:
        """Yield copies with an intact manifest, newest first; others are logged and skipped."""
        for folder in reversed(self._folders()):
            where = f"{self.url}/{folder}"
            try:
                text = self._place.read(f"{folder}/{MANIFEST}")
                yield Copy(folder, Manifest.parse(text, where=where))
            except FileNotFoundError:
                log.error("skipping a checkpoint that was never completed: %s has no manifest", where)
            except CheckpointError as error:
                log.error("skipping a damaged checkpoint: %s", error)

    def fetch(self, copy: Copy, into: Path) -> None:
        """Download a copy into the new directory `into`. Raises CheckpointError if a file is missing or has changed."""
        for name, digest in copy.manifest.files.items():
            where, target = f"{self.url}/{copy.folder}: {name}", into / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with self._place.open(f"{copy.folder}/{name}") as source, target.open("wb") as file:
                    shutil.copyfileobj(source, file)
            except FileNotFoundError:
                raise CheckpointError(f"{where} is missing; choose another checkpoint") from None
            if digest_of(target) != digest:
                raise CheckpointError(f"{where} has changed since it was written; choose another checkpoint")
        (into / MANIFEST).write_text(copy.manifest.text)

    def _folder_of(self, stem: str, digest: str) -> str:
        """Return the folder of an earlier upload of this manifest, or a new one that sorts after all."""
        same = [folder for folder in self._folders() if folder.startswith(f"{stem}-")]
        tried = [folder for folder in same if folder.endswith(digest)]
        if tried:
            return tried[-1]
        return f"{stem}-{_order(same[-1])[2] + 1}-{digest}" if same else f"{stem}-{digest}"

    def _raise_if_fenced(self, state: TrainingState) -> None:
        for folder in self._folders():
            if _order(folder)[0] > state.epoch:
                raise FencedError(
                    f"{self.url}/{folder} is of a later epoch than {state.epoch}: another trainer has taken over; this "
                    "one stops"
                )

    def _prune(self, newest: TrainingState) -> None:
        """Keep the latest complete copy of each retained version, up to the version of `newest`; remove the others."""
        self._raise_if_fenced(newest)  # a later trainer may have started during the upload
        whole = [folder for folder in self._folders() if self._place.has(f"{folder}/{MANIFEST}")]
        latest = {version: folder for folder in whole if (version := _order(folder)[1]) <= newest.model_version}
        stays = {latest[version] for version in self._retention.survivors(latest, newest.accuracies)}
        for folder in whole:
            if _order(folder)[1] > newest.model_version:
                log.warning("%s/%s is removed: the run continued from an earlier checkpoint", self.url, folder)
        for folder in set(self._folders()) - stays:
            # Remove the manifest first, so that a partly removed copy does not count.
            self._place.remove(f"{folder}/{MANIFEST}")
            self._place.remove(folder)

    def _folders(self) -> list[str]:
        return sorted((name for name in self._place.names() if _FOLDER.fullmatch(name)), key=_order)


def _order(folder: str) -> tuple[int, int, int]:
    match = _FOLDER.fullmatch(folder)
    assert match is not None
    return int(match[2]), int(match[1]), int(match[3] or 1)


def _without_secrets(file: Path) -> bytes:
    data = file.read_bytes()
    whole_lines = data[: data.rfind(b"\n") + 1]
    return without_secrets(whole_lines.decode(errors="surrogateescape")).encode(errors="surrogateescape")
