"""Attention over packed segments in buckets, on any device: it never crosses a boundary and needs no T² mask.

Inside attention only, segments of similar length are put into one bucket and padded at the end. Causal attention never
reads such padding, so fast kernels work without a mask. A prefix shared by several segments exists once in the packed
layout, and once per segment in the padded layout. Copying between the layouts only gathers, or sums in a fixed order,
so gradients are deterministic on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipelinerl.numerics import torch_attention, torch_batch_invariant
from pipelinerl.trainers.torch.packed.attention import Scores
from pipelinerl.trainers.torch.packed.sequence_parallel import SequenceGroup
from pipelinerl.trainers.torch.packed.shared_beginnings import Distinct, Sums
from trainer_contract.errors import SpecError
from trainer_contract.types import Kernels

#: Maximum segment lengths of the buckets. Each is 25 % above the previous, so padding increases the cost of attention
#: by at most 1.25².
_EDGES: Final = np.unique(np.ceil(16 * 1.25 ** np.arange(64)).astype(np.int64))


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """The mapping between the K computed tokens of a micro-batch and the P rows of the padded layout.

    Attributes:
        buckets: (number of segments, padded length) of each bucket; the products sum to P.
        token_of_row: i64 [P], the token in each row (for a padding row: some token of its segment).
        row_of_token: i64 [K], the first row of each token.
        sums: sums of gradients over the rows of tokens that several segments share; None if no token is shared.
        is_first: bool [P, 1, 1], False for padding and for copies of shared tokens; None if both layouts are equal.
        group: the processes that divide the K tokens outside attention, or None.
        kernels: fast or batch-invariant kernels for attention.
    """

    buckets: tuple[tuple[int, int], ...]
    token_of_row: Tensor
    row_of_token: Tensor
    sums: Sums | None
    is_first: Tensor | None
    group: SequenceGroup | None = None
    kernels: Kernels = Kernels.FAST

    @classmethod
    def of(
        cls,
        position_ids: NDArray[np.int32],
        device: torch.device,
        distinct: Distinct | None = None,
        group: SequenceGroup | None = None,
        *,
        kernels: Kernels = Kernels.FAST,
    ) -> SegmentPlan:
        starts = np.flatnonzero(position_ids == 0)
        lengths = np.diff(starts, append=len(position_ids))
        bucket_of = np.searchsorted(_EDGES, lengths)
        buckets, rows, real = [], [], []
        for bucket in np.unique(bucket_of):
            members = np.flatnonzero(bucket_of == bucket)
            longest = int(lengths[members].max())
            buckets.append((len(members), longest))
            offsets = np.arange(longest)
            rows.append((starts[members, None] + np.minimum(offsets, lengths[members, None] - 1)).ravel())
            real.append((offsets < lengths[members, None]).ravel())
        token_of_row, is_token = np.concatenate(rows), np.concatenate(real)
        row_of_token = np.empty(len(position_ids), dtype=np.int64)
        row_of_token[token_of_row[is_token]] = np.flatnonzero(is_token)
        sums = None
        if distinct is not None and len(distinct.kept) < len(position_ids):
            sums = Sums.of(distinct.place, device, rows=row_of_token)
            row_of_token, token_of_row = row_of_token[distinct.kept], distinct.place[token_of_row]
        is_first = np.zeros(len(token_of_row), dtype=bool)
        is_first[row_of_token] = True
        packed = len(buckets) == 1 and bool(is_first.all())
        return cls(
            buckets=tuple(buckets),
            token_of_row=torch.from_numpy(token_of_row).to(device),
            row_of_token=torch.from_numpy(row_of_token).to(device),
            sums=sums,
            is_first=None if packed else torch.from_numpy(is_first).to(device)[:, None, None],
            group=group,
            kernels=kernels,
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        q, k, v = (self.pad(x) for x in (query, key, value))
        if scores.scale is None:
            scores = scores._replace(scale=query.shape[-1] ** -0.5)
        outputs, start = [], 0
        for count, length in self.buckets:
            rows = slice(start, start + count * length)
            query, key, value = (x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v))
            outputs.append(self._attend_bucket(query, key, value, scores).flatten(0, 1))
            start = rows.stop
        return self.unpad(outputs[0] if len(outputs) == 1 else torch.cat(outputs))

    def _attend_bucket(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Return attention [n, T, H, d] of n segments, for query [n, H, T, d], key and value [n, H_kv, T, d]."""
        length = query.shape[2]
        window, scale, cap, sinks = scores
        assert scale is not None, "`attend` sets the scale"
        if self.kernels is Kernels.BATCH_INVARIANT:
            if sinks is not None:
                raise SpecError("model.kernels = batch_invariant computes no attention sinks; leave it out")
            positions = torch.arange(length)[None]
            return torch_batch_invariant.attend(query, key, value, positions, window=window, scale=scale, softcap=cap)
        if cap is not None or sinks is not None:
            attended = torch_attention.attend_scores(
                query, key, value, window=window, scale=scale, cap=cap, sinks=sinks
            )
            return attended.transpose(1, 2)
        mask = None if window is None or length <= window else _band(length, window, query.device)
        if query.is_cuda:
            key, value = torch_attention.heads_for_kernel(query, key, value, masked=mask is not None)
        out = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2)

    def pad(self, packed: Tensor) -> Tensor:
        """Convert the packed layout [K, h, d] to the padded layout [P, h, d]."""
        return packed if self.is_first is None else _Pad.apply(packed, self)

    def unpad(self, padded: Tensor) -> Tensor:
        """Convert the padded layout [P, h, d] to the packed layout [K, h, d]."""
        return padded if self.is_first is None else _Unpad.apply(padded, self)


class _Pad(torch.autograd.Function):
    """Copy tokens to padded rows. Backward copies gradients back, and sums them for shared tokens."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, plan: SegmentPlan) -> Tensor:
        ctx.plan = plan
        return packed.index_select(0, plan.token_of_row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        gradient, sums = grad.index_select(0, ctx.plan.row_of_token), ctx.plan.sums
        return gradient if sums is None else sums.put(gradient, grad), None


class _Unpad(torch.autograd.Function):
    """Copy padded rows to tokens. Padding and copies of shared tokens are not read, so their gradient is 0."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, plan: SegmentPlan) -> Tensor:
        ctx.plan = plan
        return padded.index_select(0, plan.row_of_token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.plan.token_of_row).mul_(ctx.plan.is_first), None


def _band(length: int, window: int, device: torch.device) -> Tensor:
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)


@dataclass(frozen=True, slots=True)
class PaddedPlan:
    """Segments as padded rows, for models that mix tokens outside attention or mask it in their own way.

    The model computes its own forward on each bucket of `SegmentPlan`. Padding follows a segment, and causal layers do
    not read it. A prefix that segments share is computed once for each of them.

    Attributes:
        layout: the buckets of rows, and the mapping between them and the K computed tokens.
        calls: number of forward passes, at least one for each bucket.
    """

    layout: SegmentPlan
    calls: int

    @classmethod
    def of(
        cls,
        position_ids: NDArray[np.int32],
        device: torch.device,
        distinct: Distinct | None = None,
        group: SequenceGroup | None = None,
        *,
        agree: Callable[[int], int] = int,
    ) -> PaddedPlan:
        """Plan for packed segments, whose `position_ids` [T] restart at 0.

        `agree` maps a process's number of buckets to the largest of all processes: sharded layers are gathered for each
        forward pass, by all processes at once.
        """
        assert group is None, "processes do not share padded rows"
        layout = SegmentPlan.of(position_ids, device, distinct)
        return cls(layout, agree(len(layout.buckets)))

    def hidden_states(self, trunk: nn.Module, tokens: Tensor) -> Tensor:
        """Return the last hidden states [K, d] of the computed tokens i64 [K]."""
        rows = tokens.index_select(0, self.layout.token_of_row)
        parts, start = [], 0
        for count, length in self.layout.buckets:
            own = slice(start, start + count * length)
            parts.append(last_hidden(trunk, input_ids=rows[own].view(count, length)).flatten(0, 1))
            start = own.stop
        for _ in range(self.calls - len(parts)):
            parts[0] = parts[0] + 0.0 * last_hidden(trunk, input_ids=rows[None, :1]).sum()
        padded = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.layout.unpad(padded[:, None]).squeeze(1)


def last_hidden(trunk: nn.Module, **inputs: Any) -> Tensor:
    """Return the last hidden states [n, T, d] of a model without its output layer."""
    hidden: Tensor = trunk(**inputs, use_cache=False).last_hidden_state
    return hidden
