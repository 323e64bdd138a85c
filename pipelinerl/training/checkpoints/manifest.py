"""`Manifest`: the file that completes a checkpoint and is written last; `Retention` says which checkpoints stay.

    {"format": 2, "state": {…}, "files": {"model.safetensors": "<XXH3-128>", …}, "digest": "<of all that>"}

It has the digest of every file and its own digest. These detect damage, but not deliberate changes, to a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self, cast

import xxhash

from pipelinerl.errors import CheckpointError

MANIFEST: Final = "manifest.json"
_FORMAT: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Contents of a checkpoint apart from weights and optimizer.

    Attributes:
        offsets: stream positions to resume reading from.
        ledger: record of which requested groups were trained or dropped (`ConsumedLedger.to_record`).
        controller: the controller's state after the same step.
        kl_coefficient: the current KL coefficient β, if a `KLController` adjusts it.
        baselines: average rewards by role, if advantages use them (`RoleBaseline`).
        epochs: [epoch, version at which it began] of each trainer whose steps led to these weights; this trainer is
            last. Empty in older checkpoints.
        doubted: [base URL, epoch, version] of what engines sampled with a fault (`Batcher.doubted`).
        solved: reports of groups with only correct answers that the controller has not acknowledged (`SolvedProblems`).
    """

    model_version: int
    epoch: int
    offsets: dict[str, str]
    ledger: dict[str, Any]
    controller: dict[str, Any]
    kl_coefficient: float | None = None
    baselines: dict[str, float] = field(default_factory=dict)
    epochs: list[list[int]] = field(default_factory=list)
    doubted: list[list[Any]] = field(default_factory=list)
    solved: Mapping[str, Sequence[Sequence[Any]]] = field(default_factory=dict)

    @property
    def good_version(self) -> int | None:
        """The version to which a collapsed run would return; None if it would not."""
        return self.controller.get("good_version")

    @property
    def accuracies(self) -> dict[int, float]:
        """Accuracies on the first evaluation set by model version; problems without an answer count as wrong."""
        of_first = (one for one in self.controller.get("evaluations", ()) if one.get("place", 0) == 0)
        shown = {int(one["model_version"]): one.get("at_least") for one in of_first}
        return {version: float(accuracy) for version, accuracy in shown.items() if accuracy is not None}


@dataclass(frozen=True, slots=True)
class Manifest:
    """The training state, and the digest of each file by its path in the checkpoint."""

    state: TrainingState
    files: dict[str, str]

    @property
    def digest(self) -> str:
        return digest_of_bytes(json.dumps(self._record(), sort_keys=True).encode())

    @property
    def text(self) -> str:
        return json.dumps(self._record() | {"digest": self.digest}, indent=1)

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            text = (path / MANIFEST).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path}: the manifest cannot be read ({error}); choose another checkpoint") from None
        return cls.parse(text, where=str(path))

    @classmethod
    def parse(cls, text: bytes, *, where: str) -> Self:
        """Parse and verify a manifest. Raises CheckpointError, naming `where`, if any byte has changed."""
        try:
            record = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"{where}: the manifest is damaged ({error}); choose another checkpoint") from None
        if not isinstance(record, dict) or record.get("format") != _FORMAT:
            raise CheckpointError(f"{where}: expected a manifest of format {_FORMAT}; choose another checkpoint")
        try:
            manifest = cls(TrainingState(**record["state"]), dict(record["files"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{where}: the manifest is incomplete ({error}); choose another checkpoint") from None
        if manifest.text.encode() != text:
            raise CheckpointError(f"{where}: the manifest has changed since it was written; choose another checkpoint")
        return manifest

    def verify(self, path: Path) -> None:
        """Verify every file of the checkpoint in `path`. Raises CheckpointError if one is missing or has changed."""
        for name, digest in self.files.items():
            try:
                actual = digest_of(path / name)
            except OSError:
                raise CheckpointError(f"{path}: {name} is missing; choose another checkpoint") from None
            if actual != digest:
                raise CheckpointError(f"{path}: {name} has changed since it was written; choose another checkpoint")

    def _record(self) -> dict[str, Any]:
        """Return the manifest's content after a JSON round trip, which turns integer keys into strings."""
        state = asdict(self.state)
        for name in ("epochs", "doubted", "solved", "baselines"):
            if not state[name]:
                # Leave out unset new fields, so that older manifests, which lack these fields, keep their digest.
                del state[name]
        record: dict[str, Any] = {"format": _FORMAT, "state": state, "files": self.files}
        return cast(dict[str, Any], json.loads(json.dumps(record)))


def digest_of_bytes(data: bytes) -> str:
    """Return the XXH3-128 digest of `data` as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_of(path: Path) -> str:
    """Return the XXH3-128 digest of a file as 32 hexadecimal digits. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


@dataclass(frozen=True, slots=True)
class Retention:
    """Retention limits: the newest `keep` checkpoints (at least 1), and the `keep_best` with the highest accuracy."""

    keep: int
    keep_best: int = 0

    def resumable(self, versions: Iterable[int], *, good: int | None = None) -> list[int]:
        """Return the versions from which a run can resume, ascending: the newest `keep`, and the newest to `good`."""
        rising = sorted(set(versions))
        return sorted({*rising[-self.keep :], *[each for each in rising if good is not None and each <= good][-1:]})

    def survivors(
        self, versions: Iterable[int], accuracies: Mapping[int, float], *, good: int | None = None
    ) -> set[int]:
        """Return the versions to keep, given the known accuracies; of versions with equal accuracy, the later wins."""
        present = set(versions)
        evaluated = sorted(present & accuracies.keys(), key=lambda version: (accuracies[version], version))
        best = evaluated[-self.keep_best :] if self.keep_best else []
        return {*self.resumable(present, good=good), *best}
