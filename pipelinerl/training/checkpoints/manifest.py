"""`Manifest`: what makes a checkpoint one, in a file that is written last.

    {"format": 2, "state": {…}, "files": {"model.safetensors": "<XXH3-128>", …}, "digest": "<of all that>"}

It lists every file with the digest of its bytes and carries one of its own, so that nothing of a checkpoint can change,
shrink or go missing unseen. The digests guard against damage, not against an adversary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, Self, cast

import xxhash

from pipelinerl.errors import CheckpointError

#: The manifest's file name.
MANIFEST: Final = "manifest.json"
_FORMAT: Final = 2
#: Stays in the processor's cache between its being read and its being hashed.
_BLOCK_BYTES: Final = 2**18


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """What a checkpoint carries besides weights and optimizer.

    `offsets` are the stream positions to read on from; `ledger` the orders that ended (`ConsumedLedger.to_record`);
    `controller` the controller's snapshot as of the same step boundary; `kl_coefficient` β where it is controlled;
    `epochs` the lineage as [epoch, version it began at], the trainer's own last (older checkpoints have none); `solved`
    what `SolvedProblems` had not been answered for.
    """

    model_version: int
    epoch: int
    offsets: dict[str, str]
    ledger: dict[str, Any]
    controller: dict[str, Any]
    kl_coefficient: float | None = None
    epochs: list[list[int]] = field(default_factory=list)
    solved: Mapping[str, Sequence[Sequence[Any]]] = field(default_factory=dict)

    @property
    def accuracies(self) -> dict[int, float]:
        """What each evaluation of the recipe's first set has shown at least, by the model version."""
        of_first = (one for one in self.controller.get("evaluations", ()) if one.get("place", 0) == 0)
        shown = {int(one["model_version"]): one.get("at_least") for one in of_first}
        return {version: float(accuracy) for version, accuracy in shown.items() if accuracy is not None}


@dataclass(frozen=True, slots=True)
class Manifest:
    """The state, and the digest of each file by its path in the checkpoint."""

    state: TrainingState
    files: dict[str, str]

    @property
    def digest(self) -> str:
        """Of all that it says."""
        return digest_of_bytes(json.dumps(self._record(), sort_keys=True).encode())

    @property
    def text(self) -> str:
        """As it lies in the file."""
        return json.dumps(self._record() | {"digest": self.digest}, indent=1)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Of the checkpoint in the directory `path`. Raises as `parse` does."""
        try:
            text = (path / MANIFEST).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path}: the manifest cannot be read ({error}); choose another checkpoint") from None
        return cls.parse(text, where=str(path))

    @classmethod
    def parse(cls, text: bytes, *, where: str) -> Self:
        """Read and verify a manifest.

        Raises:
            CheckpointError: it is not as it was written, to the byte; the message begins with `where`.
        """
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
        """Read every file of the checkpoint in the directory `path`.

        Raises:
            CheckpointError: one is missing, changed or unreadable; the message names it.
        """
        for name, digest in self.files.items():
            try:
                found = digest_of(path / name)
            except OSError:
                raise CheckpointError(f"{path}: {name} is missing; choose another checkpoint") from None
            if found != digest:
                raise CheckpointError(f"{path}: {name} has changed since it was written; choose another checkpoint")

    def _record(self) -> dict[str, Any]:
        """As JSON reads it back, which turns integer keys into text."""
        state = asdict(self.state)
        for name in ("epochs", "solved"):
            if not state[name]:
                del state[name]  # as it was written before there was such a field
        record: dict[str, Any] = {"format": _FORMAT, "state": state, "files": self.files}
        return cast(dict[str, Any], json.loads(json.dumps(record)))


def digest_of_bytes(data: bytes) -> str:
    """XXH3-128, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_of(path: Path) -> str:
    """XXH3-128 of a file's bytes, as 32 hexadecimal digits. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        return digest_while_copying(file, None)


class Source(Protocol):
    """Raw and buffered files."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """How many bytes were read into the buffer; 0 at the end."""
        ...


def digest_while_copying(source: Source, target: BinaryIO | None) -> str:
    """XXH3-128 of what is read from `source` to its end, all of which is written to `target`."""
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(_BLOCK_BYTES))
    while count := source.readinto(block):
        digest.update(block[:count])
        if target is not None:
            target.write(block[:count])
    return digest.hexdigest()
