"""Checkpoints: one atomic unit with one manifest, loadable by Hugging Face as it lies there.

    runs/<name>/checkpoints/step-000100/
        config.json, tokenizer.json, …   copied from the model the run began with
        model.safetensors                the weights under their Hugging Face names
        trainer/                         the backend's exact state
        critic/                          the critic's, if there is one
        manifest.json                    digests of all files; offsets, ledger, knobs, epoch, version

Written to a temporary directory, synced, renamed, parent synced: a directory with a final name is whole, or its digests
say that it is not; the manifest carries one of its own. Whatever is partial or damaged is skipped, loudly.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize_file

from pipelinerl.errors import CheckpointError
from trainer_contract.types import ParameterInfo

_MANIFEST: Final = "manifest.json"
_FORMAT: Final = 1

log = logging.getLogger("pipelinerl")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """What a checkpoint carries besides weights and optimizer.

    `offsets` are the stream positions to read on from; `ledger` the orders that ended (`Ledger.to_record`);
    `controller` the controller's snapshot as of the same step boundary; `kl_coefficient` β where it is controlled.
    """

    model_version: int
    epoch: int
    offsets: dict[str, str]
    ledger: dict[str, Any]
    controller: dict[str, Any]
    kl_coefficient: float | None = None


@final
class CheckpointStore:
    """The checkpoints of one run below `directory`; keeps the newest `keep`."""

    def __init__(self, directory: Path, *, keep: int, model_directory: Path) -> None:
        self.directory = directory
        self._keep = keep
        self._model_directory = model_directory

    def save(
        self,
        state: TrainingState,
        *,
        layout: Iterable[ParameterInfo],
        weights: Iterable[tuple[str, Any]],
        parts: Mapping[str, Callable[[Path], None]],
    ) -> Path:
        """Write a checkpoint; returns its directory once it is durable.

        Args:
            parts: what writes its state into a directory of its own, by that directory's name.
        """
        final_path = self.directory / f"step-{state.model_version:06d}"
        for abandoned in self.directory.glob(".*-step-*"):  # a trainer was killed while it wrote or replaced this one
            shutil.rmtree(abandoned)
        temporary = self.directory / f".writing-{final_path.name}"
        temporary.mkdir(parents=True)
        self._copy_model_files(temporary)
        _write_safetensors(temporary / "model.safetensors", layout, weights)
        for name, save in parts.items():
            (temporary / name).mkdir()
            save(temporary / name)
        manifest = {"format": _FORMAT, "state": asdict(state), "files": _digests(temporary)}
        (temporary / _MANIFEST).write_text(json.dumps(manifest | {"digest": _manifest_digest(manifest)}, indent=1))
        _sync_tree(temporary)
        replaced = self.directory / f".replaced-{final_path.name}"
        if final_path.exists():  # the same step of an abandoned epoch, or of a run that stops where it just saved
            final_path.rename(replaced)
        temporary.rename(final_path)
        _sync(self.directory)
        shutil.rmtree(replaced, ignore_errors=True)
        self._prune()
        return final_path

    def all(self) -> list[Path]:
        """Directories with a final name, oldest first."""
        found = [path for path in self.directory.glob("step-*") if path.is_dir() and path.name[5:].isdecimal()]
        return sorted(found, key=lambda path: int(path.name[5:]))

    def latest(self) -> tuple[Path, TrainingState] | None:
        """The newest checkpoint that is whole; damaged ones are named in the log and skipped."""
        for path in reversed(self.all()):
            try:
                return path, load(path)
            except CheckpointError as error:
                log.error("skipping a damaged checkpoint: %s", error)
        return None

    def oldest_kept_offsets(self) -> dict[str, str]:
        """Stream positions before which nothing will be read again."""
        for path in self.all():
            try:
                return TrainingState(**_manifest(path)["state"]).offsets
            except CheckpointError as error:
                log.error("skipping a damaged checkpoint: %s", error)
        return {}

    def _prune(self) -> None:
        for path in self.all()[: -self._keep]:
            shutil.rmtree(path)

    def _copy_model_files(self, target: Path) -> None:
        for source in sorted(self._model_directory.iterdir()):
            weights = source.suffix in {".safetensors", ".bin", ".pt", ".pth"} or source.name.endswith(".index.json")
            if source.is_file() and not weights and source.name != _MANIFEST:
                shutil.copyfile(source, target / source.name)


def load(path: Path) -> TrainingState:
    """Verify a checkpoint and return its state.

    Raises:
        CheckpointError: a file is missing, changed or unreadable; the message names it.
    """
    manifest = _manifest(path)
    for name, digest in manifest["files"].items():
        try:
            found = _digest(path / name)
        except OSError:
            raise CheckpointError(f"{path}: {name} is missing; choose another checkpoint") from None
        if found != digest:
            raise CheckpointError(f"{path}: {name} has changed since it was written; choose another checkpoint")
    return TrainingState(**manifest["state"])


def _manifest(path: Path) -> dict[str, Any]:
    """The manifest alone, verified. Raises CheckpointError."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: the manifest cannot be read ({error}); choose another checkpoint") from None
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise CheckpointError(f"{path}: expected a manifest of format {_FORMAT}; choose another checkpoint")
    if manifest.pop("digest", None) != _manifest_digest(manifest):
        raise CheckpointError(f"{path}: the manifest has changed since it was written; choose another checkpoint")
    return manifest


def _manifest_digest(manifest: dict[str, Any]) -> str:
    """Of the manifest as JSON reads it back, which turns integer keys into text."""
    text = json.dumps(json.loads(json.dumps(manifest)), sort_keys=True)
    return hashlib.blake2b(text.encode()).hexdigest()[:32]


def _write_safetensors(path: Path, layout: Iterable[ParameterInfo], weights: Iterable[tuple[str, Any]]) -> None:
    infos = {info.name: info for info in layout}
    buffers = {name: _host_bytes(array) for name, array in weights}  # kept alive while their addresses are read
    specs = {
        name: TensorSpec(
            dtype=infos[name].dtype, shape=infos[name].shape, data_ptr=buffer.ctypes.data, data_len=buffer.nbytes
        )
        for name, buffer in buffers.items()
    }
    serialize_file(specs, path, metadata={"format": "pt"})


def _host_bytes(array: Any) -> NDArray[np.uint8]:
    """The bytes of a numpy array, or of a tensor of a library that this file does not import; not a copy if on host."""
    if hasattr(array, "detach"):
        flat = array.detach().cpu().contiguous().flatten()
        return np.asarray(flat.view(dtype=flat.new_empty(0).byte().dtype).numpy())
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _digests(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): _digest(path) for path in files}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


def _sync_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
