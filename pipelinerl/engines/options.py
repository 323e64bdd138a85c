"""Engine settings of a recipe, common to all engine types: the only argument of every registered `from_options`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelinerl.engines.memory_budget import Room, cache_room
from pipelinerl.enums import Receiver, WeightFormat
from pipelinerl.errors import ModelError
from pipelinerl.models.context_limit import context_problem
from pipelinerl.weights.pull import PullSource
from trainer_contract.types import Device, HeadPrecision, Kernels, WeightDType


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options common to all engines; an engine type rejects an option that it does not support, and never ignores one.

    Attributes:
        model_id: name of the model in requests.
        slots: the number of sequences that run at once; `max_waiting` samples may wait for a slot.
        context_length: most tokens of a sequence, prompt included.
        dtype: dtype of weights, cache and arithmetic; the trainer sends weights in `wire_dtype`, or in `dtype` if None.
        weights: storage format of the weights of linear layers.
        head_precision: precision of the output layer; the trainer must use the same.
        kernels: kernels of the forward; the trainer must use the same.
        devices: the number of devices that share one engine's model.
        memory_share: largest share of each GPU's memory that the engine takes; None sets no bound. Not for CPUs.
        options: options of this engine type only; passed to the library that runs the model, such as vLLM.
        threads: CPU threads for the model; None leaves the library's default.
        seed: key of the noise of requests that have no seed of their own.
        pull: fetches weights from parameter servers; None disables the transport `pull`.
        receiver: the process that joins the weight group.
        server: base URL of the server that the engine drives, for engine types whose model runs in a separate server.
    """

    model_path: Path
    model_id: str
    slots: int
    max_waiting: int
    context_length: int
    dtype: WeightDType = WeightDType.FLOAT32
    wire_dtype: WeightDType | None = None
    weights: WeightFormat = WeightFormat.NATIVE
    head_precision: HeadPrecision = HeadPrecision.MODEL
    kernels: Kernels = Kernels.FAST
    device: Device = Device.AUTO
    devices: int = 1
    memory_share: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    threads: int | None = None
    seed: int = 0
    pull: PullSource | None = None
    receiver: Receiver = Receiver.IN_PROCESS
    server: str | None = None

    def check_context(self, config: Any) -> None:
        """Raise `ModelError` if `context_length` is too long for the model; for `config` see `context_problem`."""
        if problem := context_problem(config, self.model_path, self.context_length):
            raise ModelError(f"{problem}; lower it")

    def cache_room(
        self, size: int, num_bytes: int, *, allowed: int | None, window: int | None = None, slot_bytes: int = 0
    ) -> Room:
        """Return the numbers of KV cache blocks and of slots for windows to allocate; each holds `size` tokens.

        A block takes `num_bytes` bytes in layers that keep whole sequences, a slot `slot_bytes` in those with a sliding
        window of at most `window` tokens. They suffice for a full context in every row, unless `allowed` (bytes; None
        for no limit) permits only fewer. Raises `ModelError` if not even one full context fits.
        """
        room, one = (cache_room(rows, self.context_length, window, size) for rows in (self.slots, 1))
        whole, least = (each.blocks * num_bytes + each.slots * slot_bytes for each in (room, one))
        if allowed is None or whole <= allowed:
            return room
        if least > allowed:
            raise ModelError(
                f"a sequence of {self.context_length} tokens needs {least} bytes of cache, allowed are {allowed}; "
                "lower context_length, or allow more"
            )
        slots = max(one.slots, min(room.slots * allowed // whole, (allowed - least) // max(1, slot_bytes) + one.slots))
        return Room(min(room.blocks, (allowed - slots * slot_bytes) // num_bytes) if num_bytes else room.blocks, slots)

    def check_cache(self, needed: int, *, allowed: int | None) -> None:
        """Raise `ModelError` if the keys and values of all slots take more than `allowed` bytes; None sets no bound."""
        if allowed is not None and needed > allowed:
            raise ModelError(
                f"{self.slots} slots of {self.context_length} tokens need {needed} bytes of cache, allowed are "
                f"{allowed}; lower slots or context_length"
            )

    def refuse(self, engine: str, *fields: str) -> None:
        """Raise `ModelError` if one of the `fields` has a value that `engine` does not support."""
        problems = {
            "devices": (self.devices != 1)
            and f"runs its model on one device, got engine.devices={self.devices}; set it to 1",
            "options": self.options and f"has no options, got engine.options {', '.join(self.options)}; remove them",
            "receiver": self.receiver is not Receiver.IN_PROCESS
            and f"receives weights in its own way, got engine.receiver={self.receiver}; leave it out",
            "weights": self.weights is not WeightFormat.NATIVE
            and f"serves native weights only, got engine.weights={self.weights}; leave it out, or use engine.type "
            "torch",
            "head_precision": (self.head_precision is HeadPrecision.FP32 and self.dtype is not WeightDType.FLOAT32)
            and f"computes the output layer in the model's dtype, {self.dtype}; set model.head_precision=model, which "
            "also applies to the trainer, or engine.dtype=float32",
            "kernels": self.kernels is Kernels.BATCH_INVARIANT
            and "has no batch-invariant kernels; use engine.type torch on a CPU, or leave out model.kernels",
            "memory_share": self.memory_share is not None
            and f"uses no GPU memory, got engine.memory_share={self.memory_share:g}; leave it out",
        }
        for name in fields:
            if problems[name]:
                raise ModelError(f"{engine} {problems[name]}")
