"""Loads a model to decode over `PageCache`, and runs transformers' own modules on it, for any architecture.

`LlamaForward` (in `decoder`) is faster and gives the same results, for the most common family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from pipelinerl.engines.torch import attention as torch_attention
from pipelinerl.engines.torch.attention import following
from pipelinerl.engines.torch.page_cache import CacheShape, DecodePlan, PageCache, PrefillPlan
from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import load_model, replace_attention
from trainer_contract.types import WeightDType

#: Types of layers, as transformers' configurations name them, that `PageCache` supports.
_KINDS: Final = frozenset({"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"}) | {
    *("linear_attention", "conv", "hybrid", "hybrid_sliding", "moe", "mlp")
}
#: Names of the argument of a model's forward that takes the cache.
_CACHE_NAMES: Final = ("past_key_values", "cache_params", "cache")


class ModuleForward:
    """Forward through transformers' own modules, with this project's attention and cache."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self._backbone: Any = getattr(model, str(model.base_model_prefix), model)
        names = signature(self._backbone.forward).parameters
        self._cache_name = next((name for name in _CACHE_NAMES if name in names), _CACHE_NAMES[0])

    def fill(self, token_ids: Tensor, positions: Tensor, cache: PageCache, plan: PrefillPlan) -> None:
        """Compute prompts [P, T] and store their keys, values and states in `cache` as `plan` says."""
        with following(plan):
            self._call(self._backbone, token_ids, positions, cache)

    def logits(self, token_ids: Tensor, positions: Tensor, cache: PageCache, plan: DecodePlan) -> Tensor:
        """Feed one token [K, 1] to each of K rows; return the logits [K, V] of the next tokens."""
        with following(plan):
            logits: Tensor = self._call(self._model, token_ids, positions, cache).logits[:, -1]
        return logits

    @torch.no_grad()
    def cache_shape(self) -> CacheShape:
        """Return the cache's shape, from a forward with transformers' own. Raises `ModelError` if none is used."""
        config, parameter = self._model.config.get_text_config(), next(self._model.parameters())
        cache: Any = DynamicCache(config=config)
        # transformers takes both from an attention layer, which a recurrent model does not have
        cache.get_query_offset, cache.get_mask_sizes = lambda layer_idx: 0, lambda length, layer_idx: (length, 0)
        tokens = torch.zeros((1, 2), dtype=torch.int64, device=parameter.device)
        updates, update = list[tuple[int, int]](), cache.update

        def noted(keys: Tensor, values: Tensor, layer_idx: int, *rest: object, **named: object) -> Any:
            updates.append((layer_idx, len(seen)))
            return update(keys, values, layer_idx, *rest, **named)

        cache.update = noted
        own = f"{type(self._model).__name__} has a cache of its own, which this engine does not support; use another"
        try:
            with torch_attention.windows_seen() as seen:
                self._call(self._backbone, tokens, torch.arange(2, device=parameter.device)[None], cache)
        except (AttributeError, TypeError, ValueError) as error:
            if DynamicCache.__name__ in str(error):
                raise ModelError(f"{own} engine") from None
            raise
        latent = getattr(config, "kv_lora_rank", None) is not None
        # A layer attends right after it has updated the cache; layers that share keys attend without.
        windows = {
            layer: window for layer, place in updates for window in seen[place : place + 1] if window is not None
        }
        shape = CacheShape.of(cache, dtype=parameter.dtype, latent=latent, windows={} if latent else windows)
        if not (shape.pages or shape.states):
            raise ModelError(f"{own} engine")
        return shape

    def _call(self, module: Any, token_ids: Tensor, positions: Tensor, cache: Any) -> Any:
        return module(input_ids=token_ids, position_ids=positions, use_cache=True, **{self._cache_name: cache})


def load_for_decoding(
    path: Path, *, dtype: WeightDType, device: torch.device, context_length: int = 0
) -> PreTrainedModel:
    """Load the causal language model in `path` for `TorchRunner`. Raises `ModelError` for unsupported attention."""
    model = load_model(path, dtype=dtype)
    refuse_undecodable(model, context_length)
    use_page_cache(model)
    model.requires_grad_(False)
    module: Any = model
    on_device: PreTrainedModel = module.to(device)
    return on_device


def use_page_cache(model: PreTrainedModel) -> None:
    """Let a model's modules attend over `PageCache`, and compute a single token as they compute many."""
    replace_attention(model, torch_attention.NAME)
    _bound_time_steps(model)
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if hasattr(module, "index_topk") and hasattr(module, "weights_proj"):
            module.forward = partial(_unless_all, module, module.forward)


def _unless_all(indexer: Any, select: Callable[..., Any], *args: object, **named: object) -> Any:
    """Stand for the forward of an indexer of sparse attention (DeepSeek-V3.2): return None, for all tokens, with this
    engine's attention. In contexts that `refuse_undecodable` allows, an indexer selects all tokens.
    """
    return None if indexer.config._attn_implementation == torch_attention.NAME else select(*args, **named)


def refuse_undecodable(skeleton: PreTrainedModel, context_length: int = 0) -> None:
    """Raise `ModelError` if `PageCache` does not support a layer, or not at `context_length`; weights are unused."""
    kinds = set(getattr(skeleton.config.get_text_config(), "layer_types", None) or ()) - _KINDS
    if kinds:
        raise ModelError(
            f"{type(skeleton).__name__} has layers of type {', '.join(sorted(kinds))}, which this engine does not "
            "support; serve it with another engine"
        )
    selected = getattr(skeleton.config.get_text_config(), "index_topk", None)
    if selected is not None and context_length > selected:
        raise ModelError(
            f"{type(skeleton).__name__} attends to {selected} selected tokens of a longer context, which this engine "
            f"does not support; set engine.context_length={selected} or less, or serve it with another engine"
        )


def _bound_time_steps(model: nn.Module) -> None:
    """Clamp time steps of state space layers in their input, as transformers does only in a forward of all tokens."""
    modules: Iterator[Any] = model.modules()
    for module in modules:
        lowest, highest = getattr(module, "time_step_limit", None) or (0.0, math.inf)
        if hasattr(module, "dt_bias") and (lowest > 0 or highest < math.inf):
            module.in_proj.register_forward_hook(partial(_clamp_time_steps, module, lowest, highest))


def _clamp_time_steps(layer: Any, lowest: float, highest: float, _module: object, _input: object, out: Tensor) -> None:
    # The layer adds `dt_bias` and applies softplus, whose inverse is log(exp(x) − 1).
    least, most = (-math.inf if x == 0 else math.log(math.expm1(x)) if x < 20 else x for x in (lowest, highest))
    bias = layer.dt_bias.float()
    steps = out[..., -len(bias) :]
    steps.copy_(torch.maximum(torch.minimum(steps.float(), most - bias), least - bias))
