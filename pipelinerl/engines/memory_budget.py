"""`EngineBudget`: computes from sizes alone what a GPU must hold besides an engine's weights, and whether it fits.

Updates need a second copy of the weights. This memory is therefore reserved before the cache is sized, together with
the workspaces of a prefill and of a decode step, and a reserve for what has no size in advance. The paged cache takes
what is left, and at least one sequence of the whole context must fit. Nothing is checked without a GPU, because hosts
have swap.

The sizes of both workspaces are counted from the code and, like the reserve, were not measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from pipelinerl.errors import ModelError
from pipelinerl.models.model_shape import BYTES, CacheBytes, ModelShape
from trainer_contract.types import WeightDType

#: Number of tokens in a block of the cache. Shorter blocks need more matrix products, longer ones waste more memory.
BLOCK: Final = 32
#: Maximum number of padded tokens in one prefill forward pass of the torch engine.
PREFILL_TOKENS: Final = 16384
#: Maximum number of attention scores, or of mask entries, that a prefill of the torch engine holds at once.
PREFILL_SCORES: Final = 2**24
#: Bytes per logit of a decode step: 64 for the sampler's fp32 copies, its fp64 sums and the sort of top-p, and 24 for
#: the tensors that a captured CUDA graph, which samples without top-p, keeps.
_SAMPLING_BYTES: Final = 64 + 24
#: The least reserve in bytes: 1 GiB, and 0.5 GiB for the buffers that NCCL creates at the first update.
_RESERVE: Final = 3 * 2**29
_RESERVED_SHARE: Final = 0.05


class Room(NamedTuple):
    """The most blocks of a cache, and the most slots of layers with a sliding window."""

    blocks: int
    slots: int


def window_blocks(context: int, window: int | None, size: int = BLOCK) -> int:
    """Return the most blocks of `size` tokens that a sequence of `context` tokens needs in layers with a window."""
    return 0 if window is None else min(-(-context // size), 1 - (-window // size))


def cache_room(rows: int, context: int, window: int | None, size: int = BLOCK) -> Room:
    """Return the room for `rows` sequences of `context` tokens, with further slots for prefixes and their reuse."""
    blocks = rows * -(-context // size)
    return Room(blocks, (rows + max(2, rows // 4)) * window_blocks(context, window, size))


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
        """Bytes that this process may still plan for, without its reserve."""
        most = self.total if self.share is None else int(self.share * self.total)
        return max(0, min(self.free, most - self.ours) - reserve_of(most))


def reserve_of(num_bytes: int) -> int:
    """Return the bytes that an engine leaves unplanned if it may take `num_bytes` of its GPU.

    They are for CUDA graphs, workspaces and modules of cuBLAS and Triton, buffers of NCCL, the scores of a prefill
    (`PREFILL_SCORES`), and fragments.
    """
    return max(_RESERVE, int(_RESERVED_SHARE * num_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBudget:
    """Bytes that an engine takes on its GPU besides the serving weights.

    Attributes:
        cache: keys and values of all slots at their full length; less is enough for shorter sequences.
        sequence: keys and values of one sequence of the whole context.
        staging: the second copy of the weights, which receives updates.
        conversion: the buffer for an update in another dtype than the engine's; 0 if the dtypes are equal.
        prefill: workspace of the largest prefill.
        logits: workspace of a decode step of all slots with their drafts.
        states: states of recurrent layers, of all slots.
    """

    slots: int
    cache: int
    sequence: int
    staging: int
    conversion: int
    prefill: int
    logits: int
    states: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts: the bytes besides the serving weights, with a full-length cache for all slots."""
        return self.cache + self.staging + self.conversion + self.prefill + self.logits + self.states

    @property
    def least(self) -> int:
        """The minimum number of bytes that the engine needs besides its weights, with a cache for one sequence."""
        return self.total - self.cache + self.sequence

    def most_slots(self, left: int) -> int:
        """Return the most slots for which `left` bytes suffice, with the cache of one sequence."""
        of_slots = self.logits + self.states
        return max(0, (left - (self.least - of_slots)) * self.slots // of_slots)

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
            "states": self.states,
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
    cache: CacheBytes | None = None,
    drafted: int = 0,
) -> EngineBudget:
    """Return the budget of a torch engine.

    Args:
        cache: sizes of the cache; None takes those that follow from the model's layers.
        received: bytes of the buffer that receives an update in the engine's dtype.
        spare: bytes of the second set of quantised weights, which holds the next update; 0 without quantisation.
        drafted: most tokens that a step adds to a row's next one.
    """
    size = BYTES[dtype]
    tokens = min(max(PREFILL_TOKENS, context), slots * context)
    each = shape.cache.in_bytes(dtype) if cache is None else cache
    if each.window is not None and each.window >= context:  # layers keep whole sequences
        each = CacheBytes(each.token + each.in_window, 0, None, each.states)
    room, one = (cache_room(number, context, each.window) for number in (slots, 1))
    # In fp32: the residual stream before and after attention, and its norm, which is then cast to the model's dtype.
    residual = (3 * 4 + size) * shape.hidden
    # A rotation is computed in fp32: two products of the queries are added, then cast.
    attention = ((2 * size + 8) * shape.heads + 4 * size * shape.kv_heads) * shape.head_dim
    return EngineBudget(
        slots=slots,
        cache=BLOCK * (room.blocks * each.token + room.slots * each.in_window),
        sequence=BLOCK * (one.blocks * each.token + one.slots * each.in_window),
        states=2 * slots * each.states,  # those of rows, and those at the end of their prompts
        staging=received + spare,
        conversion=shape.count * BYTES[wire] if wire is not dtype else 0,
        prefill=tokens * (residual + max(attention, 3 * size * shape.intermediate)),
        logits=slots * (1 + drafted) * shape.vocab * (size + _SAMPLING_BYTES),
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
