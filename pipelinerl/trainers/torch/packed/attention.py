"""Attention over packed segments for any Hugging Face model, implemented in `segments.py` and `varlen.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from pipelinerl.trainers.torch.packed.sequence_parallel import SequenceGroup
from trainer_contract.errors import SpecError

#: Name under which `attend` is registered in transformers.
IMPLEMENTATION: Final = "pipelinerl_segments"

#: Name of an argument that some architectures pass to attention, that would change its result, and that is not
#: supported.
_UNSUPPORTED: Final = "position_bias"


class Scores(NamedTuple):
    """How a layer weighs the keys of a query.

    Attributes:
        window: number of positions that a query sees, including its own; None for all earlier ones.
        scale: factor of the scores; None means 1/√d.
        cap: largest absolute value of a score, by tanh (Gemma 2); None sets no bound.
        sinks: [H], one more score per head, which takes its share of the softmax and has no value (gpt-oss), or None.
    """

    window: int | None = None
    scale: float | None = None
    cap: float | None = None
    sinks: Tensor | None = None


class AttentionPlan(Protocol):
    """A plan of attention: where the segments of a micro-batch lie among the K tokens that the model computes."""

    @property
    def group(self) -> SequenceGroup | None: ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Return causal attention [K, H, d] within each segment, for query [K, H, d], key and value [K, H_kv, d]."""
        ...


class WantedMask:
    """The mask that a model asks for, as a value instead of a tensor: causal or a sliding window.

    A model may cut its mask to the number of keys. One that computes with it fails, and then trains as padded rows.
    """

    def __init__(self, window: int | None, whole: Callable[[], Tensor | None]) -> None:
        self.window = window
        self._whole = whole

    def __getitem__(self, part: Any) -> WantedMask:
        return self

    def is_plain(self, positions: Tensor) -> bool:
        """Return whether the mask in each segment is what `window` says; `positions` i64 [T] restart at 0 in each
        segment.
        """
        segments = (positions == 0).cumsum(0)
        distance = positions[:, None] - positions
        seen = (distance >= 0) & (distance < (self.window or len(positions)))
        whole = self._whole()
        assert whole is not None, "transformers leaves no mask out here"
        differs = whole.view_as(seen) != seen
        return not bool((differs & (segments[:, None] == segments)).any())


def _wanted_mask(*, local_size: int | None = None, **asked: Any) -> WantedMask:
    """Implement transformers' interface of masks: return what a model asks for; `local_size` is a window or chunk."""
    return WantedMask(local_size, partial(sdpa_mask, **asked | {"allow_is_causal_skip": False, "use_vmap": True}))


class OpaquePlan:
    """A wrapper that hides an `AttentionPlan` from torch's compiler while it is passed through a model's layers.

    torch 2.11 compiles layers again for each different structure of a dataclass among their arguments, and gives up
    compiling after eight.
    """

    def __init__(self, plan: AttentionPlan, checked: Tensor | None = None) -> None:
        self._plan = plan
        #: i64 [T], the positions of a packed row for which `attend` compares the model's mask with its window, or None.
        self.checked = checked

    @property
    def group(self) -> SequenceGroup | None:
        return self._plan.group

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        return self._plan.attend(query, key, value, scores)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    segments: OpaquePlan | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface for one packed row; dropout is never applied.

    Args:
        query: [1, H, K, d]; key and value: [1, H_kv, K, d]. With n processes, each has K / n of the K tokens.
        attention_mask: the `WantedMask` that this module registers in transformers. It alone sets the window.
        segments: where the packed segments lie and how to compute their attention. The caller passes this plan to the
            model's forward as a keyword, and transformers passes it on.
        scaling, softcap, s_aux: see `Scores`.

    Returns:
        [1, K, H, d], and no attention weights.

    Raises:
        SpecError: the architecture needs what packed segments do not support.
    """
    name = type(module).__name__
    if segments is None:
        raise SpecError(f"{name} does not receive the arguments of its model's forward; use another model")
    if not isinstance(attention_mask, WantedMask):
        raise SpecError(f"{name} needs a mask of its own, which packed segments do not support; use another model")
    if segments.checked is not None and not attention_mask.is_plain(segments.checked):
        raise SpecError(f"{name} asks for a mask that is neither causal nor a sliding window; use another model")
    if others.get(_UNSUPPORTED) is not None:
        raise SpecError(f"attention with {_UNSUPPORTED!r} is not supported over packed segments; use another model")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if segments.group is not None:
        q, k, v = segments.group.to_heads(q, k, v)
        s_aux = None if s_aux is None else segments.group.own_heads(s_aux)
    attended = segments.attend(q, k, v, Scores(attention_mask.window, scaling, softcap, s_aux))
    if segments.group is not None:
        attended = segments.group.to_tokens(attended)
    return attended[None], None


AttentionInterface.register(IMPLEMENTATION, attend)
AttentionMaskInterface.register(IMPLEMENTATION, _wanted_mask)
