"""Tiny random models of the families of causal language models that the torch trainer accepts.

Every kind of dropout and noise that a family's configuration offers is set, so that a pass in train mode would show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

VOCAB: Final = 48

#: Values of all configurations' sizes by name; a family's configuration takes those that it has.
_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "n_positions": 128,
    "head_dim": 8,
    **dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "expert_ffn_hidden_size", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "zero_expert_num"), 1),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 8),
}
#: Further settings of single families: a dense first layer, and shapes that other settings imply.
_OWN: Final[Mapping[str, Mapping[str, Any]]] = {
    "deepseek_v2": {"num_key_value_heads": 4, "topk_method": "greedy"},
    "deepseek_v3": {"num_key_value_heads": 4},
    "diffllama": {"attention_dropout": 0.0},  # the only value that it accepts
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "longcat_flash": {"num_key_value_heads": 4},
    "phi3": {"sliding_window": None},
    "phimoe": {"sliding_window": None},
    "youtu": {"num_key_value_heads": 4},
}

FAMILIES: Final = (
    *("afmoe", "apertus", "arcee", "cwm", "deepseek_v2", "deepseek_v3", "diffllama", "dots1", "ernie4_5"),
    *("ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "gemma", "gemma3_text", "glm", "glm4", "glm4_moe"),
    *("glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neox", "granitemoe", "granitemoeshared", "helium"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "jais2", "jetmoe", "laguna", "llama", "longcat_flash", "mellum"),
    *("minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "opt"),
    *("persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3"),
    *("solar_open", "starcoder2", "youtu"),
)


def family_config(name: str, **changes: Any) -> Any:
    """Return the configuration of a tiny model of type `name`, with every dropout and noise of this type at 0.3."""
    kind = CONFIG_MAPPING[name]
    defaults = kind()
    sizes = {key: value for key, value in _SIZES.items() if hasattr(defaults, key)}
    noise = {
        key: 0.3
        for key, value in defaults.to_dict().items()
        if ("drop" in key or "pdrop" in key or "jitter" in key) and isinstance(value, float)
    }
    return kind(**{**sizes, **noise, **_OWN.get(name, {}), **changes})


def save_family(path: Path, name: str, **changes: Any) -> Path:
    """Write a random model of type `name` to `path`, with weights so large that mistakes show."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(family_config(name, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
        model.get_input_embeddings().weight[0] = 0.0  # transformers' Youtu zeroes this row at each load
    model.save_pretrained(path)
    return path
