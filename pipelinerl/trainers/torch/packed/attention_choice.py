"""Which attention a torch trainer's packed rows get: the rule, from facts alone and without torch.

    varlen     `torch.nn.attention.varlen.varlen_attn`, one kernel over all segments: CUDA, bf16
    buckets    `segments.py`, any device and dtype, and what `varlen` is compared with

The kernel (flash attention 2, as torch brings it) takes sliding windows, fewer key heads than query heads, any scale,
beginnings that segments share, and heads divided among processes. What it does not take is said by `why_not_varlen`.
Capped scores and attention sinks neither of the two takes (`attention.py` refuses them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple, Self

from trainer_contract.errors import SpecError
from trainer_contract.types import Precision

#: Of the kernel: the least compute capability, and what the numbers of a head are a multiple of, and the most of them.
_CAPABILITY: Final = (8, 0)
_WIDTHS: Final = (8, 256)


class SegmentAttention(StrEnum):
    """How the tokens of packed segments attend to those before them."""

    AUTO = "auto"
    """By the kernel where it can be, else by buckets."""
    BUCKETS = "buckets"
    VARLEN = "varlen"


class HeadShapes(NamedTuple):
    """How many heads of queries and of keys, and of how many numbers: each that is named, none where none is."""

    queries: int
    keys: int
    widths: frozenset[int]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """From the configuration of a model's text part, as in config.json.

        Heads of linear attention are none of them: these layers do not attend here.
        """
        heads, hidden = (
            _whole(config, *names) for names in (("num_attention_heads", "n_head"), ("hidden_size", "n_embd"))
        )
        widths = {_whole(config, key) for key in config if key.endswith("head_dim") and not key.startswith("linear_")}
        if not any(widths) and heads:
            widths = {hidden // heads}
        return cls(heads, _whole(config, "num_key_value_heads") or heads, frozenset(widths - {0}))


def _whole(config: Mapping[str, Any], *names: str) -> int:
    """The first of these that is a whole number; 0 where none is."""
    return next((value for name in names if isinstance(value := config.get(name), int)), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFacts:
    """What the choice hangs on.

    Attributes:
        device: torch's word for its kind.
        precision: what passes compute in.
        capability: of the GPU; None where there is none, or where it is on another machine.
        has_kernel: was this torch built with it?
        widths: numbers of a head, of all kinds of heads that the model's configuration names.
    """

    device: str
    precision: Precision
    capability: tuple[int, int] | None
    has_kernel: bool
    widths: frozenset[int]


def why_not_varlen(facts: AttentionFacts) -> str | None:
    """The first thing that keeps the kernel from being used; None where nothing does."""
    multiple, most = _WIDTHS
    if facts.device != "cuda":
        return f"the device is {facts.device}, and the kernel is CUDA's"
    if facts.precision is not Precision.BF16:
        return f"the precision is {facts.precision}, and the kernel computes in bf16"
    if not facts.has_kernel:
        return "this torch was built without flash attention"
    if facts.capability is not None and facts.capability < _CAPABILITY:
        has, needs = (".".join(map(str, each)) for each in (facts.capability, _CAPABILITY))
        return f"the GPU's compute capability is {has}, and the kernel needs {needs}"
    if len(facts.widths) != 1:
        widths = ", ".join(map(str, sorted(facts.widths))) or "unknown"
        return f"the model's heads are of several widths ({widths}), and the kernel takes one"
    (width,) = facts.widths
    if width % multiple or width > most:
        return f"the model's heads are {width} wide, and the kernel takes multiples of {multiple} up to {most}"
    return None


def chosen(asked: SegmentAttention, why_not: str | None) -> SegmentAttention:
    """BUCKETS or VARLEN.

    Args:
        why_not: what keeps the kernel from being used, if anything does.

    Raises:
        SpecError: the kernel is asked for, and cannot be used.
    """
    if asked is SegmentAttention.VARLEN and why_not is not None:
        raise SpecError(f'options.attention = "varlen" cannot be: {why_not}; say "auto", or leave it out')
    if asked is SegmentAttention.BUCKETS or why_not is not None:
        return SegmentAttention.BUCKETS
    return SegmentAttention.VARLEN


def described(asked: SegmentAttention, why_not: str | None) -> str:
    """For people: what is used, and why. Raises SpecError as `chosen`."""
    if chosen(asked, why_not) is SegmentAttention.VARLEN:
        return "varlen, one kernel over all segments of a row"
    return f"buckets of segments of similar length ({why_not or 'as options.attention says'})"
