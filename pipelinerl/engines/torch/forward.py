"""Loads a model to decode over `PageCache`, and runs transformers' own modules on it, for any architecture.

`LlamaForward` (in `decoder`) is faster and gives the same results, for the most common family.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipelinerl.engines.torch import attention as torch_attention
from pipelinerl.engines.torch.page_cache import DecodePlan, PageCache, PrefillPlan
from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import load_model, replace_attention
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


def load_for_decoding(path: Path, *, dtype: WeightDType, device: torch.device) -> PreTrainedModel:
    """Load the causal language model in `path` for `TorchRunner`. Raises `ModelError` for unsupported attention."""
    model = load_model(path, dtype=dtype)
    refuse_undecodable(model)
    replace_attention(model, torch_attention.NAME)
    model.requires_grad_(False)
    module: Any = model
    on_device: PreTrainedModel = module.to(device)
    return on_device


def refuse_undecodable(skeleton: PreTrainedModel) -> None:
    """Raise `ModelError` if `PageCache` cannot keep the keys and values of a model; its weights are not used."""
    text = skeleton.config.get_text_config()
    name = type(skeleton).__name__
    if getattr(text, "kv_lora_rank", None):
        raise _unsupported(f"{name} has latent attention, whose keys and values are of other widths")
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds := kinds - {"full_attention", "sliding_attention"}:
        raise _unsupported(f"{name} has layers of type {sorted(kinds)}, not full or sliding attention")


def _unsupported(reason: str) -> ModelError:
    return ModelError(f"{reason}, so this engine cannot keep its cache; serve it with another engine")
