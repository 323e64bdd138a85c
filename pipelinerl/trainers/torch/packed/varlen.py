"""Attention over packed segments in one kernel, `torch.nn.attention.varlen.varlen_attn`, which takes their boundaries.

If segments share a prefix, each computed token has one query, but each segment has the keys and values of all its
tokens, including the prefix. The causal mask is aligned to the end of the keys. A segment costs its number of unshared
tokens times its length.

The kernel caps no scores; layers with capped scores attend in buckets. It knows no sinks, but a sink only changes the
normaliser of the softmax, which the kernel returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelinerl.trainers.torch.packed.attention import Scores
from pipelinerl.trainers.torch.packed.segments import SegmentPlan
from pipelinerl.trainers.torch.packed.sequence_parallel import SequenceGroup
from pipelinerl.trainers.torch.packed.shared_beginnings import Distinct, Indices, Reading


class VarlenKernel(Protocol):
    """The part of `varlen_attn`'s signature that is used here."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None,
        window_size: tuple[int, int],
        enable_gqa: bool,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return attention [K, H, d] for query [K, H, d], key and value [M, H_kv, d], differentiable.

        Args:
            cu_seq_q: i32 [S + 1], the start of each of the S segments' queries, then K; `cu_seq_k` likewise for keys.
            max_q: the largest number of queries in a segment; `max_k` likewise for keys.
            window_size: (n, 0), where n is the number of keys before a query's own position that it sees (-1: all). The
                last query of a segment has the position of the segment's last key.
            sinks: [H], see `Scores`, or None.
        """
        ...


def torch_kernel() -> VarlenKernel:
    """Return torch's kernel for any number of key heads; the import is slow, since it loads torch's compiler."""
    from torch.nn.attention.varlen import varlen_attn

    return with_sinks(for_fewer_key_heads(varlen_attn), torch.ops.torch_attn)


def for_fewer_key_heads(kernel: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return a kernel that accepts fewer key heads than query heads; before torch 2.12, it repeats key heads."""
    if "enable_gqa" in signature(kernel).parameters:
        return kernel

    def repeating(query: Tensor, key: Tensor, value: Tensor, *bounds: Any, enable_gqa: bool, **settings: Any) -> Tensor:
        if enable_gqa:
            key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
        return cast(Tensor, kernel(query, key, value, *bounds, **settings))

    return repeating


def with_sinks(kernel: Callable[..., Tensor], operators: Any) -> VarlenKernel:
    """Return a kernel that also takes sinks, from one without and from torch's two operators behind it."""

    def attending(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *bounds: Any,
        scale: float | None,
        window_size: tuple[int, int],
        enable_gqa: bool,
        sinks: Tensor | None,
    ) -> Tensor:
        if sinks is None:
            return kernel(query, key, value, *bounds, scale=scale, window_size=window_size, enable_gqa=enable_gqa)
        call = _Call(operators, bounds, window_size == (-1, 0), scale, window_size, enable_gqa)
        return cast(Tensor, _WithSinks.apply(query, key, value, sinks, call))

    return cast(VarlenKernel, attending)


class _Call(NamedTuple):
    """The arguments of torch's operators that are no tensors of heads."""

    operators: Any
    bounds: tuple[Any, ...]
    is_causal: bool
    scale: float | None
    window_size: tuple[int, int]
    enable_gqa: bool


class _WithSinks(torch.autograd.Function):
    """Attention with sinks by a kernel that knows none.

    With the normaliser l of the scores alone and a sink s, the shares shrink by exp(l − l'), where l' = log(exp(l) +
    exp(s)). The kernel's backward needs the shares only through output and normaliser, so with the shrunk output and l'
    it returns exact gradients. The sink's own gradient is −exp(s − l') · ⟨gradient, output⟩, as its value is 0.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, call: _Call) -> Tensor:
        out, alone, random = call.operators._varlen_attn(
            query, key, value, *call.bounds, call.is_causal, call.scale, list(call.window_size), call.enable_gqa
        )
        own = sinks.float()[:, None]
        normaliser = torch.logaddexp(alone, own)  # [H, K]
        out = out * (alone - normaliser).exp().T[..., None].to(out.dtype)
        ctx.call = call
        ctx.save_for_backward(query, key, value, sinks, out, normaliser, random)
        return cast(Tensor, out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        query, key, value, sinks, out, normaliser, random = ctx.saved_tensors
        call: _Call = ctx.call
        slopes = call.operators._varlen_attn_backward(
            *(grad.contiguous(), query, key, value, out, normaliser, *call.bounds, call.is_causal, random),
            *(call.scale, list(call.window_size)),
        )
        share = (sinks.float()[:, None] - normaliser).exp()
        of_sinks = -(share * (grad.float() * out.float()).sum(-1).T).sum(1)
        return *slopes, of_sinks.to(sinks.dtype), None


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """The boundaries of the S segments among the K computed tokens; segments without a computed token are omitted.

    Attributes:
        query_starts: i32 [S + 1], where each segment's queries start among the K computed tokens.
        key_starts: i32 [S + 1], where each segment's keys start among the M tokens of all whole segments.
        most_queries, most_keys: the largest number of queries, and of keys, in a segment.
        keys: copies the K computed tokens to the M tokens of whole segments; None if no token is shared, so that K = M.
        kernel: the attention kernel.
        takes_sinks: False if the kernel's results with sinks are wrong on this device.
        buckets: returns the plan of the layers that the kernel cannot compute.
        group: the processes that divide the K tokens outside attention, or None.
    """

    query_starts: Tensor
    key_starts: Tensor
    most_queries: int
    most_keys: int
    keys: Reading | None
    kernel: VarlenKernel
    takes_sinks: bool
    buckets: Callable[[], SegmentPlan]
    group: SequenceGroup | None = None

    @classmethod
    def of(
        cls,
        position_ids: NDArray[np.int32],
        device: torch.device,
        distinct: Distinct | None = None,
        group: SequenceGroup | None = None,
        *,
        kernel: VarlenKernel,
        takes_sinks: bool = True,
    ) -> VarlenPlan:
        begins = position_ids == 0
        lengths = np.diff(np.flatnonzero(begins), append=len(position_ids))
        own, keys = lengths, None
        if distinct is not None and len(distinct.kept) < len(position_ids):
            segment_of = np.cumsum(begins) - 1
            own = np.bincount(segment_of[distinct.kept], minlength=len(lengths))
            keys = Reading.of(distinct.place[own[segment_of] > 0], len(distinct.kept), device)
            own, lengths = own[own > 0], lengths[own > 0]
        return cls(
            query_starts=_starts(own, device),
            key_starts=_starts(lengths, device),
            most_queries=int(own.max()),
            most_keys=int(lengths.max()),
            keys=keys,
            kernel=kernel,
            takes_sinks=takes_sinks,
            buckets=cache(partial(SegmentPlan.of, position_ids, device, distinct, group)),
            group=group,
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Compute `AttentionPlan.attend`; cast to autocast's dtype here, because autocast does not cover the kernel."""
        window, scale, cap, sinks = scores
        if cap is not None or (sinks is not None and not self.takes_sinks):
            return self.buckets().attend(query, key, value, scores)
        if self.keys is not None:
            key, value = self.keys(key), self.keys(value)
        kind = query.device.type
        if torch.is_autocast_enabled(kind):
            query, key, value = (each.to(torch.get_autocast_dtype(kind)) for each in (query, key, value))
        before = -1 if window is None or window >= self.most_keys else window - 1
        return self.kernel(
            query,
            key,
            value,
            self.query_starts,
            self.key_starts,
            self.most_queries,
            self.most_keys,
            scale=scale,
            window_size=(before, 0),
            enable_gqa=query.shape[1] != key.shape[1],
            sinks=sinks,
        )


def _starts(lengths: Indices, device: torch.device) -> Tensor:
    return torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32)).to(device)
