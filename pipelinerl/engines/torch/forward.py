"""Loads a model to decode over `PageCache`, and runs transformers' own modules on it, for any architecture.

`LlamaForward` (in `decoder`) is faster and gives the same results, for the most common family.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from pipelinerl.engines.torch import attention as torch_attention
from pipelinerl.engines.torch.page_cache import DecodePlan, PageCache, PrefillPlan
from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import load_model
from trainer_contract.types import WeightDType


@final
class ModuleForward:
    """Forward through transformers' own modules, with this project's attention and cache."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._backbone: nn.Module = getattr(model, str(model.base_model_prefix), model)

    def fill(self, token_ids: Tensor, positions: Tensor, cache: PageCache, plan: PrefillPlan) -> None:
        """Compute prompts [P, T] and store their keys and values in `cache` as `plan` says."""
        self._backbone(input_ids=token_ids, position_ids=positions, past_key_values=cache, use_cache=True, plan=plan)

    def logits(self, token_ids: Tensor, positions: Tensor, cache: PageCache, plan: DecodePlan) -> Tensor:
        """Feed one token [K, 1] to each of K rows; return the logits [K, V] of the next tokens."""
        output: Any = self._model(
            input_ids=token_ids, position_ids=positions, past_key_values=cache, use_cache=True, plan=plan
        )
        return output.logits[:, -1]


def load_for_decoding(path: Path, *, dtype: WeightDType, device: torch.device) -> nn.Module:
    """Load the causal language model in `path` for `TorchRunner`. Raises `ModelError` for unsupported attention."""
    try:
        model = load_model(path, dtype=dtype, attention=torch_attention.NAME)
    except KeyError as error:  # transformers raises this for models whose attention cannot be replaced
        raise _unsupported(f"the attention of the model in {path} cannot be replaced") from error
    text = model.config.get_text_config()
    if getattr(text, "kv_lora_rank", None):
        raise _unsupported(f"{type(model).__name__} has latent attention, whose keys and values are of other widths")
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds := kinds - {"full_attention", "sliding_attention"}:
        raise _unsupported(f"{type(model).__name__} has layers of type {sorted(kinds)}, not full or sliding attention")
    module: nn.Module = model.requires_grad_(False)
    return module.to(device)


def _unsupported(reason: str) -> ModelError:
    return ModelError(f"{reason}, so this engine cannot keep its cache; serve it with another engine")
