"""Attention over packed segments for any Hugging Face model, implemented in `segments.py` and `varlen.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface

from pipelinerl.trainers.torch.packed.sequence_parallel import SequenceGroup
from pipelinerl.trainers.torch.packed.shared_beginnings import Distinct
from trainer_contract.errors import SpecError

#: Name under which `attend` is registered in transformers.
IMPLEMENTATION: Final = "pipelinerl_segments"

#: Names of arguments that some architectures pass to attention, that would change its result, and that are not
#: supported.
_UNSUPPORTED: Final = ("softcap", "s_aux", "position_bias")


class AttentionPlan(Protocol):
    """A plan of attention: where the segments of a micro-batch lie among the K tokens that the model computes."""

    @property
    def group(self) -> SequenceGroup | None:
        """The processes that divide the K tokens, and inside attention the heads; None for a single process."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, window: int | None, scale: float | None) -> Tensor:
        """Return causal attention [K, H, d] within each segment, for query [K, H, d], key and value [K, H_kv, d].

        A query sees `window` positions, including its own (None: all earlier ones). `scale` None means 1/√d.
        """
        ...


@final
class OpaquePlan:
    """A wrapper that hides an `AttentionPlan` from torch's compiler while it is passed through a model's layers.

    torch 2.11 compiles layers again for each different structure of a dataclass among their arguments, and gives up
    compiling after eight.
    """

    def __init__(self, plan: AttentionPlan) -> None:
        self._plan = plan

    @property
    def group(self) -> SequenceGroup | None:
        """The group of the wrapped plan."""
        return self._plan.group

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, window: int | None, scale: float | None) -> Tensor:
        """Call `attend` of the wrapped plan."""
        return self._plan.attend(query, key, value, window=window, scale=scale)


#: Function that makes an `AttentionPlan` for packed segments. Its first argument is each token's position [T], which
#: restarts at 0 in each segment. If its third argument is None, all tokens are computed.
Planner = Callable[[NDArray[np.int32], torch.device, Distinct | None, SequenceGroup | None], AttentionPlan]


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: AttentionPlan | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface for one packed row; dropout is never applied.

    Args:
        query: [1, H, K, d]; key and value: [1, H_kv, K, d]. With n processes, each has K / n of the K tokens.
        attention_mask: None, since transformers creates no mask for this implementation; a few models bring their own.
        segments: where the packed segments lie and how to compute their attention. The caller passes this plan to the
            model's forward as a keyword, and transformers passes it on.

    Returns:
        [1, K, H, d], and no attention weights.

    Raises:
        SpecError: the architecture needs what packed segments do not support.
    """
    name = type(module).__name__
    if segments is None:
        raise SpecError(f"{name} does not receive the arguments of its model's forward; use another model")
    if attention_mask is not None:
        raise SpecError(f"{name} needs a mask of its own, which packed segments do not support; use another model")
    for argument in _UNSUPPORTED:
        if others.get(argument) is not None:
            raise SpecError(f"attention with {argument!r} is not supported over packed segments; use another model")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if segments.group is not None:
        q, k, v = segments.group.to_heads(q, k, v)
    attended = segments.attend(q, k, v, window=sliding_window, scale=scaling)
    if segments.group is not None:
        attended = segments.group.to_tokens(attended)
    return attended[None], None


AttentionInterface.register(IMPLEMENTATION, attend)
