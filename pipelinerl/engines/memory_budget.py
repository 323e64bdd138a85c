"""`EngineBudget`: computes from sizes alone what a GPU must hold besides an engine's weights, and whether it fits.

The first update allocates a second copy of the weights. This memory is therefore reserved before the cache is sized,
together with the workspaces of a prefill and of a decode step. The paged cache takes what is left, and at least one
sequence of the whole context must fit. Nothing is checked without a GPU, because hosts have swap.

The sizes of both workspaces are counted from the code and were not measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pipelinerl.errors import ModelError
from pipelinerl.models.model_shape import BYTES, ModelShape
from trainer_contract.types import WeightDType

#: Maximum number of padded tokens in one prefill forward pass of the torch engine.
PREFILL_TOKENS: Final = 16384
#: Bytes per logit of a decode step: 64 for the sampler's fp32 copies, its fp64 sums and the sort of top-p, and 24 for
#: the tensors that a captured CUDA graph, which samples without top-p, keeps.
_SAMPLING_BYTES: Final = 64 + 24


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of a GPU, in bytes: `ours` is taken by this process, weights included, and `free` by no process.

    `share` is the largest share of `total` that this process may take; None sets no bound.
    """

    total: int
    free: int
    ours: int
    share: float | None = None

    @property
    def left(self) -> int:
        """Bytes that this process may still take."""
        return self.free if self.share is None else min(self.free, int(self.share * self.total) - self.ours)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBudget:
    """Bytes that an engine takes on its GPU besides the serving weights.

    Attributes:
        cache: keys and values of all slots at their full length; less is enough for shorter sequences.
        staging: the second copy of the weights, allocated at the first update.
        conversion: the buffer for an update in another dtype than the engine's; 0 if the dtypes are equal.
        prefill: workspace of the largest prefill.
        logits: workspace of a decode step of all slots.
    """

    slots: int
    cache: int
    staging: int
    conversion: int
    prefill: int
    logits: int

    @property
    def total(self) -> int:
        """The sum of all parts: the bytes besides the serving weights, with a full-length cache for all slots."""
        return self.cache + self.staging + self.conversion + self.prefill + self.logits

    @property
    def sequence(self) -> int:
        """Keys and values of one sequence of the whole context."""
        return self.cache // self.slots

    @property
    def least(self) -> int:
        """The minimum number of bytes that the engine needs besides its weights, with a cache for one sequence."""
        return self.total - self.cache + self.sequence

    def most_slots(self, left: int) -> int:
        """Return the most slots whose decode workspace fits `left` bytes.

        All other parts, and a cache for only one sequence, are subtracted first.
        """
        return max(0, (left - (self.least - self.logits)) * self.slots // self.logits)

    def cache_within(self, memory: DeviceMemory, *, context_length: int) -> int:
        """Return the bytes that the cache may take. Raises `ModelError` if not even one sequence fits."""
        left = memory.left
        if self.least <= left:
            return min(self.cache, left - (self.total - self.cache))
        parts = {
            "keys and values of one sequence": self.sequence,
            "the second copy of the weights": self.staging,
            "the weights as they are sent": self.conversion,
            "prefill": self.prefill,
            "logits": self.logits,
        }
        listed = ", ".join(f"{name} {_mib(size)}" for name, size in parts.items() if size)
        most = self.most_slots(left)
        slots = f"set engine.slots to {most} or less" if most else "no number of slots fits"
        remedies = ["lower engine.context_length"] if most else []
        remedies += ["raise engine.memory_share"] if memory.share is not None else ["use a larger device"]
        remedies += ["set weights.dtype to the engine's"] if self.conversion else []
        raise ModelError(
            f"{self.slots} slots of {context_length} tokens need {_mib(self.least)} besides the weights ({listed}), "
            f"{_mib(left)} are left of the device's {_mib(memory.total)}; {slots}, or {', or '.join(remedies)}"
        )


def budget_of(
    shape: ModelShape,
    *,
    dtype: WeightDType,
    wire: WeightDType,
    slots: int,
    context: int,
    received: int,
    spare: int = 0,
) -> EngineBudget:
    """Return the budget of a torch engine.

    Args:
        received: bytes of the buffer that receives an update in the engine's dtype.
        spare: bytes of the second set of quantised weights, which holds the next update; 0 without quantisation.
    """
    size = BYTES[dtype]
    tokens = min(max(PREFILL_TOKENS, context), slots * context)
    return EngineBudget(
        slots=slots,
        cache=2 * shape.layers * slots * context * shape.kv_heads * shape.head_dim * size,
        staging=received + spare,
        conversion=shape.count * BYTES[wire] if wire is not dtype else 0,
        prefill=_prefill_bytes(shape, tokens, size),
        logits=slots * shape.vocab * (size + _SAMPLING_BYTES),
    )


def _prefill_bytes(shape: ModelShape, tokens: int, size: int) -> int:
    residual = 3 * shape.hidden  # the residual stream, its norm, and the layer's result
    attention = 4 * (shape.heads + shape.kv_heads) * shape.head_dim  # queries, keys, values, with and without RoPE
    return tokens * size * (residual + max(attention, 3 * shape.intermediate))


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
