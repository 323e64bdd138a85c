"""Selection of the attention implementation for a torch trainer's packed rows; needs no torch.

    varlen     `torch.nn.attention.varlen.varlen_attn`, one kernel over all segments: CUDA, bf16
    buckets    `segments.py`, any device and dtype, and the reference for `varlen`

The kernel is flash attention 2, as shipped with torch; `why_not_varlen` lists its limitations. Layers with capped
scores are always computed in buckets.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple, Self

from trainer_contract.errors import SpecError
from trainer_contract.types import Kernels, Precision

#: The varlen kernel's requirements: the minimum compute capability; a number that divides head widths; their maximum.
_CAPABILITY: Final = (8, 0)
_WIDTHS: Final = (8, 256)


#: Why a model does not train packed.
PADDED: Final = "packed, it would compute otherwise than transformers; a step takes about 1.3 × the time"


class SegmentAttention(StrEnum):
    """Attention implementations for packed segments: each token attends to earlier tokens of its own segment."""

    AUTO = "auto"
    """The kernel if possible, else buckets."""
    BUCKETS = "buckets"
    VARLEN = "varlen"


class HeadShapes(NamedTuple):
    """The numbers of query and key heads, and the set of head widths, which is empty if the configuration has none."""

    queries: int
    keys: int
    widths: frozenset[int]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read the shapes from the configuration of the text model; heads of linear attention are ignored."""
        heads, hidden = (
            _whole(config, *names) for names in (("num_attention_heads", "n_head"), ("hidden_size", "n_embd"))
        )
        widths = {_whole(config, key) for key in config if key.endswith("head_dim") and not key.startswith("linear_")}
        if not any(widths) and heads:
            widths = {hidden // heads}
        return cls(heads, _whole(config, "num_key_value_heads") or heads, frozenset(widths - {0}))


def _whole(config: Mapping[str, Any], *names: str) -> int:
    return next((value for name in names if isinstance(value := config.get(name), int)), 0)


def why_not_varlen(
    *,
    device: str,
    precision: Precision,
    capability: tuple[int, int] | None,
    has_kernel: bool,
    widths: frozenset[int],
) -> str | None:
    """Return the first reason why the varlen kernel cannot be used, or None if it can.

    Args:
        device: torch's name of the device type.
        capability: the GPU's compute capability; None if it is unknown.
        has_kernel: False if torch was built without the kernel.
        widths: the widths of all kinds of heads.
    """
    multiple, most = _WIDTHS
    if device != "cuda":
        return f"the device is {device}, and the kernel needs CUDA"
    if precision is not Precision.BF16:
        return f"the precision is {precision}, and the kernel needs bf16"
    if not has_kernel:
        return "this torch was built without flash attention"
    if capability is not None and capability < _CAPABILITY:
        has, needs = (".".join(map(str, each)) for each in (capability, _CAPABILITY))
        return f"the GPU's compute capability is {has}, and the kernel needs {needs}"
    if len(widths) != 1:
        several = ", ".join(map(str, sorted(widths))) or "unknown"
        return f"the model's heads are of several widths ({several}), and the kernel needs one"
    (width,) = widths
    if width % multiple or width > most:
        return f"the model's heads are {width} wide, and the kernel takes multiples of {multiple} up to {most}"
    return None


def chosen(requested: SegmentAttention, why_not: str | None) -> SegmentAttention:
    """Return BUCKETS or VARLEN. Raises SpecError if VARLEN was requested and `why_not` says that it cannot be used."""
    if requested is SegmentAttention.VARLEN and why_not is not None:
        raise SpecError(f'options.attention = "varlen" is not possible: {why_not}; use "auto", or leave it out')
    if requested is SegmentAttention.BUCKETS or why_not is not None:
        return SegmentAttention.BUCKETS
    return SegmentAttention.VARLEN


def refuse_padded(requested: SegmentAttention, kernels: Kernels, *, cp: int) -> None:
    """Raise SpecError for a request that only models can meet that train packed; `cp` processes share a micro-batch."""
    remedy = "the model trains padded, so leave it out"
    if requested is not SegmentAttention.AUTO:
        raise SpecError(f'options.attention = "{requested}" is for packed rows; {remedy}')
    if kernels is Kernels.BATCH_INVARIANT:
        raise SpecError(f"model.kernels = batch_invariant is for packed rows; {remedy}")
    if cp > 1:
        raise SpecError(f"options.mesh.cp divides packed rows; {remedy}")


def described(requested: SegmentAttention, why_not: str | None) -> str:
    """Describe for the log which implementation is used and why. Raises SpecError like `chosen`."""
    if chosen(requested, why_not) is SegmentAttention.VARLEN:
        return "varlen, one kernel over all segments of a row"
    return f"buckets of segments of similar length ({why_not or 'set by options.attention'})"
