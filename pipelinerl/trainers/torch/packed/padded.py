"""Segments as padded rows, for models that mix tokens outside attention or mask it in their own way.

The model computes its own forward on each bucket of `SegmentPlan`. Padding follows a segment, and causal layers do not
read it. A prefix that segments share is computed once for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipelinerl.trainers.torch.packed.segments import SegmentPlan
from pipelinerl.trainers.torch.packed.sequence_parallel import SequenceGroup
from pipelinerl.trainers.torch.packed.shared_beginnings import Distinct


@dataclass(frozen=True, slots=True)
class PaddedPlan:
    """How a micro-batch's segments lie in padded rows.

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
