"""Checkpoint state of a `JaxTrainer`: sharded arrays in TensorStore, bit-exact, restorable onto any mesh.

    trainer.json                          format, model_version, architecture, mesh
    arrays/<weights|mean|square>/<name>/  zarr 3: one file per shard of the array, each with its CRC-32C

Each process writes and reads only its own shards, called parts here, so no host holds a whole array. Reading a missing,
truncated or altered part raises an error. The caller syncs the files to disk and renames the directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import tensorstore
from jax.sharding import NamedSharding

from pipelinerl.models.decoder_config import DecoderConfig
from pipelinerl.trainers.option_table import architecture_of, read_record, write_record
from trainer_contract.errors import StateError

#: Arrays by kind, then by parameter name. The kinds are the master weights and Adam's two moments.
Kinds = Mapping[str, Mapping[str, jax.Array]]
KINDS: Final = ("weights", "mean", "square")


@dataclass(frozen=True, slots=True)
class JaxSavedState:
    """A saved state whose `trainer.json` has been read and checked; `restore` reads its arrays."""

    path: Path
    model_version: int

    def restore(self, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, dict[str, jax.Array]]:
        """Read all arrays, in the shapes, dtypes and shardings of `like`. Raises StateError if an array is damaged."""
        return {kind: {name: self._array(kind, name, wanted) for name, wanted in like.items()} for kind in KINDS}

    def _array(self, kind: str, name: str, expected: jax.ShapeDtypeStruct) -> jax.Array:
        sharding = expected.sharding
        assert isinstance(sharding, NamedSharding)
        parts = sharding.addressable_devices_indices_map(expected.shape)
        try:
            store = tensorstore.open(_spec(self.path, kind, name), open=True).result()
            if tuple(store.shape) != expected.shape:
                raise ValueError(f"its shape is {list(store.shape)}, expected {list(expected.shape)}")
            reading = [(device, store[index].read()) for device, index in parts.items() if index is not None]
            placed = [jax.device_put(np.asarray(part.result(), expected.dtype), device) for device, part in reading]
        except (ValueError, OSError) as error:
            reason = str(error).partition("\n")[0][:300]
            raise StateError(
                f"the array {kind}/{name} of the trainer state in {self.path} is missing or damaged: {reason}; restore "
                "another checkpoint"
            ) from error
        return jax.make_array_from_single_device_arrays(expected.shape, sharding, placed)


def save_parts(path: Path, arrays: Kinds) -> None:
    """Write this process's parts into the existing directory `path`, which all processes share."""
    writing = [
        write
        for kind, named in arrays.items()
        for name, array in named.items()
        for write in _write(_spec(path, kind, name), array)
    ]
    for write in writing:
        write.result()


def save_record(path: Path, arrays: Kinds, *, config: DecoderConfig, model_version: int) -> None:
    """Write `trainer.json` after every process has written its parts; a state without it counts as missing.

    All processes must share a file system: raises StateError if the parts of other processes are not visible here.
    """
    for kind, named in arrays.items():
        for name, array in named.items():
            _raise_if_parts_lack(path, kind, name, array)
    sharding = next(iter(arrays["weights"].values())).sharding
    mesh = dict(sharding.mesh.shape) if isinstance(sharding, NamedSharding) else {}
    write_record(path, model_version=model_version, architecture=_architecture(config), mesh=mesh)


def load(path: Path, *, expected: DecoderConfig) -> JaxSavedState:
    """Read the state's `trainer.json`. Raises StateError if it is missing, damaged, or not of the model `expected`."""
    record = read_record(path, architecture=_architecture(expected), model_type=expected.model_type)
    return JaxSavedState(path, record["model_version"])


def _write(spec: dict[str, Any], array: jax.Array) -> list[tensorstore.WriteFutures]:
    store = tensorstore.open(
        spec,
        create=True,
        open=True,
        dtype=tensorstore.dtype(array.dtype.name),
        shape=array.shape,
        chunk_layout=tensorstore.ChunkLayout(chunk_shape=array.sharding.shard_shape(array.shape)),
    ).result()
    return [store[part.index].write(np.asarray(part.data)) for part in array.addressable_shards if part.replica_id == 0]


def _raise_if_parts_lack(path: Path, kind: str, name: str, array: jax.Array) -> None:
    if array.is_fully_addressable:
        return  # this process wrote all parts, so none can be missing
    expected = prod(array.shape) // prod(array.sharding.shard_shape(array.shape))
    count = sum(1 for file in (_folder(path, kind, name) / "c").rglob("*") if file.is_file())
    if count != expected:
        raise StateError(
            f"the trainer state in {path} must have {expected} parts of {kind}/{name}, and rank 0 sees {count}; "
            "put the run's directory on a file system that every host mounts at the same path"
        )


def _folder(path: Path, kind: str, name: str) -> Path:
    return path.absolute() / "arrays" / kind / name.replace(".*", "")


def _spec(path: Path, kind: str, name: str) -> dict[str, Any]:
    # The code that makes a checkpoint durable syncs only rank 0's files; other hosts must sync their parts themselves.
    synced = jax.process_index() != 0
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{_folder(path, kind, name)}/"},
        "context": {"file_io_sync": synced},
        "metadata": {"codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]},
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }


def _architecture(config: DecoderConfig) -> str:
    """Return a digest of the model's configuration; the dtype and, for a policy, `scalar_head` do not affect it."""
    left_out = {"dtype"} if config.scalar_head else {"dtype", "scalar_head"}
    return architecture_of({name: value for name, value in asdict(config).items() if name not in left_out})
