"""Tiny mixture-of-experts models, whose experts differ so much that log-probs show which expert computed a token."""

from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig

from pipelinerl.plugins.warmstart.tiny_decoder import char_tokenizer
from trainer_contract.types import RoutingShape

CONTEXT: Final = 64
ROUTING: Final = RoutingShape(layers=2, experts=4, top_k=2)

_SIZES: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "num_experts_per_tok": ROUTING.top_k,
}


def mixture_config(kind, vocab):
    """Return the configuration of a model of type `kind`, one of those in `models.routing.REPLAYED`."""
    sizes = {**_SIZES, "vocab_size": vocab}
    if kind == "qwen3_moe":
        return Qwen3MoeConfig(
            **sizes, head_dim=8, num_experts=ROUTING.experts, moe_intermediate_size=24, norm_topk_prob=True
        )
    if kind == "qwen2_moe":
        return Qwen2MoeConfig(
            **sizes, num_experts=ROUTING.experts, moe_intermediate_size=24, shared_expert_intermediate_size=24
        )
    if kind == "olmoe":
        return OlmoeConfig(**sizes, num_experts=ROUTING.experts, intermediate_size=24)
    return MixtralConfig(**sizes, num_local_experts=ROUTING.experts, intermediate_size=24)


def save_mixture(path, kind="qwen3_moe", *, vocab=None, scale=5.0):
    """Write a random model to `path`; `scale` multiplies all its weight matrices."""
    tokenizer = char_tokenizer()
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(mixture_config(kind, vocab or len(tokenizer)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(scale)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
