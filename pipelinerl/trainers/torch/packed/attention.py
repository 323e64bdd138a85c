"""Attention over packed segments, for any Hugging Face model: where models find it, and what may stand behind it.

Attention alone keeps rollouts apart; everything else in the model works on the packed tokens. How it does is the plan's
to say: `segments.py` lays rollouts out in buckets, `varlen.py` tells one kernel where they end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface

from pipelinerl.trainers.torch.packed.sequence_parallel import SequenceGroup
from pipelinerl.trainers.torch.packed.shared_beginnings import Distinct
from trainer_contract.errors import SpecError

#: Under this name models find `attend`.
IMPLEMENTATION: Final = "pipelinerl_segments"

#: What an architecture may pass that changes attention's result and is not handled here.
_UNSUPPORTED: Final = ("softcap", "s_aux", "position_bias")


class AttentionPlan(Protocol):
    """Where the segments of the K tokens that are computed of a micro-batch lie."""

    @property
    def group(self) -> SequenceGroup | None:
        """The processes among which the K tokens are divided outside attention, if there are several."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, window: int | None, scale: float | None) -> Tensor:
        """[K, H, d] of query [K, H, d], key and value [K, H_kv, d]: causal, within each segment.

        Args:
            window: positions that a query sees, itself included; None is all before it.
            scale: of the scores; None is 1/√d.
        """
        ...


#: Plans packed segments: from their positions [T], which restart at 0 in each, on a device. Without `Distinct` all are
#: computed.
Planner = Callable[[NDArray[np.int32], torch.device, Distinct | None, SequenceGroup | None], AttentionPlan]


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: AttentionPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface over one packed row; dropout is never applied.

    Args:
        module: the attention layer, unused.
        query: [1, H, K, d]; key and value: [1, H_kv, K, d]. Of several processes each has K / n of the K tokens.
        attention_mask: None, since transformers makes no mask for this implementation.
        segments: the plan, passed to the model's forward as a keyword.
        scaling: of the scores; None is 1/√d.
        sliding_window: positions that a query sees, itself included.

    Returns:
        [1, K, H, d], and no attention weights.
    """
    for name in _UNSUPPORTED:
        if others.get(name) is not None:
            raise SpecError(f"attention with {name!r} is not supported over packed segments; use another architecture")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if segments.group is not None:
        q, k, v = segments.group.to_heads(q, k, v)
    attended = segments.attend(q, k, v, window=sliding_window, scale=scaling)
    if segments.group is not None:
        attended = segments.group.to_tokens(attended)
    return attended[None], None


AttentionInterface.register(IMPLEMENTATION, attend)
