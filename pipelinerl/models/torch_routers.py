"""The routers of a mixture-of-experts model: an engine records their choices, and a trainer replays them.

Router logits of sampler and trainer differ by rounding, so of two nearly equal experts they may choose different ones,
and the rest of the forward pass diverges. In rollout routing replay (R3: Ma et al. 2025, arXiv 2510.11370), the trainer
uses the sampler's choice. The weights of the chosen experts still come from the trainer's own router logits, so
gradients reach the router.

Supported are routers that choose the k likeliest experts of a softmax over all (Qwen2-MoE, Qwen3-MoE, OLMoE, Mixtral).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from trainer_contract.types import Experts, RoutingShape

#: Supported router classes, each with True if the router rounds the chosen experts' weights to the logits' dtype.
_ROUNDS: Final = {
    "MixtralTopKRouter": False,
    "OlmoeTopKRouter": True,
    "Qwen2MoeTopKRouter": True,
    "Qwen3MoeTopKRouter": True,
}


def routers_of(model: nn.Module) -> list[Any]:
    """Return the supported routers in the order of the layers."""
    return [module for module in model.modules() if type(module).__name__ in _ROUNDS]


def shape_of(model: nn.Module) -> RoutingShape | None:
    """Return the sizes of the supported routers; None if there are none."""
    routers = routers_of(model)
    return RoutingShape(len(routers), routers[0].num_experts, routers[0].top_k) if routers else None


class TorchRouteLog:
    """Log of the experts that an engine's routers chose in the last forward pass; it records while `is_on`."""

    def __init__(self, model: nn.Module, shape: RoutingShape) -> None:
        self.shape = shape
        self.is_on = False
        self.decoded: Experts = np.empty((0, shape.layers, shape.top_k), shape.dtype)
        """The choices of the last decode step [B, layers, top_k], for the input token of each row."""
        self.prefilled: list[Experts] = []
        """The choices of the last prefill [tokens, layers, top_k], one array per prompt."""
        self._chosen: list[Tensor] = []

        def recording(forward: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
            def record(hidden: Tensor) -> Any:
                routed = forward(hidden)
                if self.is_on:
                    self._chosen.append(routed[2])
                return routed

            return record

        for router in routers_of(model):
            router.forward = recording(router.forward)

    def take(self) -> Experts:
        """Return the choices of the last forward pass, [tokens of all prompts, layers, top_k], and clear the log."""
        chosen, self._chosen = torch.stack(self._chosen, dim=1), []
        return chosen.to(torch.int32).cpu().numpy().astype(self.shape.dtype)


class ReplayedRouters:
    """Replays recorded expert choices in a trainer's routers; without a recording, the routers choose.

    `tell` sets the recording. It stays until the next `tell`, because activation checkpointing runs the routers again
    in backward.
    """

    def __init__(self, model: nn.Module) -> None:
        self._replayed: Tensor | None = None
        for layer, router in enumerate(routers_of(model)):
            router.forward = self._replaying(router, layer, router.forward)

    def tell(self, routed: Tensor | None) -> None:
        """Set the experts [K, layers, top_k] of the next forward pass's K tokens; with None, the routers choose."""
        self._replayed = routed

    def _replaying(self, router: Any, layer: int, forward: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def replay(hidden: Tensor) -> Any:
            if self._replayed is None:
                return forward(hidden)
            experts = self._replayed[:, layer].long()
            logits = linear(hidden.reshape(-1, router.hidden_dim), router.weight)  # [K, experts]
            weights = logits.float().softmax(dim=-1).gather(-1, experts)  # [K, top_k]
            if getattr(router, "norm_topk_prob", True):  # Mixtral lacks this setting and always normalises
                weights = weights / weights.sum(dim=-1, keepdim=True)
            return logits, weights.to(logits.dtype) if _ROUNDS[type(router).__name__] else weights, experts

        return replay
