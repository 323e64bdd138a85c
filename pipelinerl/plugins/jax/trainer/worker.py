"""`JaxWorker`, the share of one process in a JAX trainer: its shards, and the programs that compute on them.

Except for `save_parts` and `save_record`, each process must call the same methods with the same arguments in the same
order; results and errors are then the same on every rank. `JaxTrainer` checks arguments.

A checkpoint is sharded arrays in TensorStore, bit-exact, restorable onto any mesh:

    trainer.json                          format, model_version, architecture, mesh
    arrays/<weights|mean|square>/<name>/  zarr 3: one file per shard of the array, each with its CRC-32C

Each process writes and reads only its own shards, called parts here, so no host holds a whole array. Reading a missing,
truncated or altered part raises an error. The caller syncs the files to disk and renames the directory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import prod
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tensorstore
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from pipelinerl.errors import ModelError
from pipelinerl.models.decoder_config import DecoderConfig
from pipelinerl.plugins.jax.decoder import bound_memory, export_order, export_weight, load_weights, place_weights
from pipelinerl.plugins.jax.logprobs import LOGITS_AT_ONCE, LOGITS_ON_ACCELERATOR
from pipelinerl.plugins.jax.trainer import mesh as jax_mesh, program as jax_program
from pipelinerl.plugins.jax.trainer.attention import PADDING, PackedAttention, Rows
from pipelinerl.plugins.jax.trainer.options import JaxOptions
from pipelinerl.plugins.jax.trainer.program import TrainerProgram, Weights
from pipelinerl.trainers.option_table import architecture_of, read_record, write_record
from trainer_contract.errors import NonFiniteError, SpecError, StateError
from trainer_contract.host_weights import num_bytes
from trainer_contract.types import (
    Device,
    Float32,
    HostWeights,
    LossStats,
    MicroBatch,
    Objective,
    OptimizerSpec,
    ParameterInfo,
    Precision,
    Rounding,
    StepStats,
    TrainerSpec,
)

_PLATFORMS: Final = {Device.AUTO: None, Device.CPU: "cpu", Device.CUDA: "cuda", Device.TPU: "tpu"}


@dataclass(slots=True)
class JaxWorker:
    """The weights, Adam's moments and the gradient of one process; the gradient is None until `backward`."""

    program: TrainerProgram
    optimizer: OptimizerSpec
    weights: Weights
    moments: optax.ScaleByAdamState
    model_version: int
    gradient: Weights | None = None
    rounding: Rounding = Rounding.NEAREST
    #: This version's weights after dithered rounding, as engines hold them; None until a pass needs them.
    served: Weights | None = None

    @classmethod
    def started(cls, spec: TrainerSpec, options: JaxOptions, config: DecoderConfig) -> JaxWorker:
        """Load this process's shards of the weights and, if the spec restores a state, of the moments."""
        bound_memory(spec.memory_share)
        try:
            devices = jax.devices(_PLATFORMS[spec.device])
        except RuntimeError as error:
            raise SpecError(
                f"device is {spec.device}, but jax finds none: {error}; set device to auto or cpu"
            ) from error
        compute = jnp.bfloat16 if spec.precision is Precision.BF16 else jnp.float32
        requested, platform, windows = options.attention, devices[0].platform, config.window is not None
        if requested is PackedAttention.SPLASH and platform != "tpu":
            raise SpecError(f'options.attention = "splash" is a kernel for TPUs, got {platform}; leave it out')
        if requested is PackedAttention.SPLASH and windows:
            raise SpecError('options.attention = "splash" has no sliding windows, which this model has; leave it out')
        program = TrainerProgram(
            config=config,
            mesh=jax_mesh.build(options.mesh, devices),
            compute=compute,
            remat=options.remat,
            attention=PackedAttention.on(platform, compute=compute, windows=windows)
            if requested is None
            else requested,
            head=spec.head_precision,
            logits_at_once=LOGITS_AT_ONCE if platform == "cpu" else LOGITS_ON_ACCELERATOR,
        )
        if spec.restore_from is not None:
            restored = _read_state(spec.restore_from, program)
            return cls(program, spec.optimizer, *restored, rounding=spec.rounding)
        try:
            weights = load_weights(spec.model_path, config, place=lambda p: jax_mesh.of_parameter(program.mesh, p))
        except ModelError as error:
            raise SpecError(f"model_path: {error}") from error
        fresh = jax_program.new_moments(program, weights)
        return cls(program, spec.optimizer, weights, fresh, 0, rounding=spec.rounding)

    @property
    def config(self) -> DecoderConfig:
        return self.program.config

    def layout(self) -> tuple[ParameterInfo, ...]:
        """Return all parameters layer by layer, in the dtype of the model directory, which engines load."""
        return tuple(
            ParameterInfo(parameter.name_at(layer or 0), parameter.shape, self.config.dtype)
            for parameter, layer in export_order(self.config)
        )

    def forward(self, batches: Sequence[MicroBatch]) -> list[Float32]:
        return [_forward(self.program, self._served(), batch) for batch in batches]

    def _served(self) -> Weights:
        """Return the weights for passes: a dithered policy's as engines hold them, else fp32, which `fetch` rounds."""
        if not self.dithers or self.config.scalar_head:
            return self.weights
        if self.served is None:
            self.served = jax_program.dithered(self.config, self.weights)
        return self.served

    def forward_at(self, batches: Sequence[MicroBatch], weights: HostWeights | None) -> list[Float32]:
        """Run `forward` with `weights`, which only rank 0 has and broadcasts; other ranks call this with None."""
        sizes = {info.name: num_bytes(info) for info in self.layout()}

        def received(name: str) -> NDArray[np.uint8]:
            own = np.zeros(sizes[name], np.uint8) if weights is None else weights[name]
            if jax.process_count() == 1:
                return own
            sent: NDArray[np.uint8] = multihost_utils.broadcast_one_to_all(own)
            return sent

        other = place_weights(self.config, received, like=self.weights)
        return [_forward(self.program, other, batch) for batch in batches]

    def backward(self, number: int, batch: MicroBatch, objective: Objective) -> LossStats:
        """Accumulate the gradient of a micro-batch; padding in rows counts as tokens outside the loss mask.

        Raises NonFiniteError with `number`, the micro-batch's index in the trainer's call, if the loss is not finite.
        """
        rows, columns = laid_out(self.program, batch)
        so_far = jax_program.zeros(self.weights) if self.gradient is None else self.gradient
        self.gradient, device_loss, logprobs = jax_program.accumulate(
            self.program, objective, self._served(), so_far, columns
        )
        loss = float(device_loss)
        if not math.isfinite(loss):
            self.gradient = None
            raise NonFiniteError(
                f"the loss is {loss}: look for NaN or infinity in advantages, weights and the sampler's "
                "log-probs; the gradient was cleared",
                number=number,
            )
        return LossStats(loss, rows.collect(_whole(logprobs)))

    def optimizer_step(self, learning_rate: float) -> StepStats:
        """Clip and apply the gradient, then clear it; reject a gradient that is not finite."""
        assert self.gradient is not None, "the trainer has checked that there is a gradient"
        gradient, self.gradient, self.served = self.gradient, None, None
        rate = np.float32(learning_rate)
        self.weights, self.moments, device_norm = jax_program.step(
            self.program, self.optimizer, self.weights, self.moments, gradient, rate
        )
        norm = float(device_norm)
        if not math.isfinite(norm):
            raise NonFiniteError(f"the gradient's norm is {norm}: it was cleared and the weights are unchanged")
        self.model_version += 1
        return StepStats(self.model_version, norm, learning_rate)

    @property
    def dithers(self) -> bool:
        """True if weights are rounded to bfloat16 by dithering; `gathered` then returns fp32, which rank 0 rounds."""
        return self.rounding is Rounding.DITHERED and self.config.dtype == "bfloat16"

    def gathered(self, place: int) -> jax.Array:
        """Return the parameter at position `place` of the layout, gathered so that each device holds all of it."""
        parameter, layer = list(export_order(self.config))[place]
        dtype = jnp.float32 if self.dithers else jnp.dtype(self.config.dtype)
        gathered = export_weight(self.weights, parameter, layer, dtype=dtype)
        return gathered.block_until_ready()

    def save_parts(self, path: Path) -> None:
        """Write this process's shards of weights and moments. A JAX trainer has no random state."""
        write_parts(path, self._arrays())

    def save_record(self, path: Path) -> None:
        """Write `trainer.json` after every process has written its parts."""
        write_manifest(path, self._arrays(), config=self.config, model_version=self.model_version)

    def _arrays(self) -> Kinds:
        return dict(zip(KINDS, (self.weights, self.moments.mu, self.moments.nu), strict=True))


def laid_out(program: TrainerProgram, batch: MicroBatch) -> tuple[Rows, dict[str, jax.Array]]:
    """Arrange a micro-batch as rows and put them on the mesh; each process puts its own rows on its devices."""
    mesh = program.mesh
    least = program.attention.least_columns
    rows = Rows.of(batch.position_ids, multiple=mesh.shape["data"] * mesh.shape["fsdp"], least_columns=least)
    fills = {"segment_ids": PADDING, "temperatures": 1.0}
    columns = {field.name: getattr(batch, field.name) for field in fields(batch)}
    arrays = {name: column for name, column in columns.items() if isinstance(column, np.ndarray)}
    spread = {name: rows.spread(column, fill=fills.get(name, 0)) for name, column in arrays.items()}
    sharding = jax_mesh.of_rows(mesh)
    if sharding.is_fully_addressable:
        return rows, jax.device_put(spread, sharding)
    return rows, {
        name: jax.make_array_from_callback(rows.shape, sharding, column.__getitem__) for name, column in spread.items()
    }


def _whole(array: jax.Array) -> NDArray[Any]:
    """Return the whole array on this host; if the array spans processes, every process must call this function."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def _forward(program: TrainerProgram, weights: Weights, batch: MicroBatch) -> Float32:
    rows, columns = laid_out(program, batch)
    logprobs = rows.collect(_whole(jax_program.logprobs(program, weights, columns)))
    if not np.isfinite(logprobs).all():
        raise NonFiniteError("the model's log-probs are not finite: its weights are broken, restore a checkpoint")
    return logprobs


#: Arrays by kind, then by parameter name. The kinds are the master weights and Adam's two moments.
Kinds = Mapping[str, Mapping[str, jax.Array]]
KINDS: Final = ("weights", "mean", "square")


def _read_state(path: Path, program: TrainerProgram) -> tuple[Weights, optax.ScaleByAdamState, int]:
    """Read weights, moments and version onto the mesh. Raises StateError if they are damaged or of another model."""
    config, mesh = program.config, program.mesh
    record = read_record(path, architecture=_architecture(config), model_type=config.model_type)
    weights, mean, square = (
        {p.name: _array(path, kind, p.name, p.stacked_shape, jax_mesh.of_parameter(mesh, p)) for p in config.parameters}
        for kind in KINDS
    )
    count = jax_mesh.everywhere(mesh, np.asarray(record["model_version"], np.int32))
    return weights, optax.ScaleByAdamState(count=count, mu=mean, nu=square), record["model_version"]


def _array(path: Path, kind: str, name: str, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    parts = sharding.addressable_devices_indices_map(shape)
    try:
        store = tensorstore.open(_spec(path, kind, name), open=True).result()
        if tuple(store.shape) != shape:
            raise ValueError(f"its shape is {list(store.shape)}, expected {list(shape)}")
        reading = [(device, store[index].read()) for device, index in parts.items() if index is not None]
        placed = [jax.device_put(np.asarray(part.result(), np.float32), device) for device, part in reading]
    except (ValueError, OSError) as error:
        reason = str(error).partition("\n")[0][:300]
        raise StateError(
            f"the array {kind}/{name} of the trainer state in {path} is missing or damaged: {reason}; restore another "
            "checkpoint"
        ) from error
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def write_parts(path: Path, arrays: Kinds) -> None:
    """Write this process's parts into the existing directory `path`, which all processes share."""
    writing = []
    for kind, named in arrays.items():
        for name, array in named.items():
            chunks = tensorstore.ChunkLayout(chunk_shape=array.sharding.shard_shape(array.shape))
            dtype = tensorstore.dtype(array.dtype.name)
            store = tensorstore.open(
                _spec(path, kind, name), create=True, open=True, dtype=dtype, shape=array.shape, chunk_layout=chunks
            ).result()
            own = (part for part in array.addressable_shards if part.replica_id == 0)
            writing += [store[part.index].write(np.asarray(part.data)) for part in own]
    for write in writing:
        write.result()


def write_manifest(path: Path, arrays: Kinds, *, config: DecoderConfig, model_version: int) -> None:
    """Write `trainer.json` after all parts, as the state's last file. Raises StateError if parts are not visible."""
    for kind, named in arrays.items():
        for name, array in named.items():
            if array.is_fully_addressable:
                continue  # this process wrote all parts, so none can be missing
            expected = prod(array.shape) // prod(array.sharding.shard_shape(array.shape))
            count = sum(1 for file in (_folder(path, kind, name) / "c").rglob("*") if file.is_file())
            if count != expected:
                raise StateError(
                    f"the trainer state in {path} must have {expected} parts of {kind}/{name}, and rank 0 sees "
                    f"{count}; put the run's directory on a file system that every host mounts at the same path"
                )
    sharding = next(iter(arrays["weights"].values())).sharding
    mesh = dict(sharding.mesh.shape) if isinstance(sharding, NamedSharding) else {}
    write_record(path, model_version=model_version, architecture=_architecture(config), mesh=mesh)


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
