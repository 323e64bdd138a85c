"""Tiny random models of every causal language model family in transformers, for tests of what the product accepts.

    python tests/families/zoo.py DIRECTORY [FAMILY …]        write them, with any transformers from 4.57

Sizes are so small that a model takes a fraction of a second. Each layer type of a hybrid appears. Persistent buffers
get noise, so that a lost buffer changes log-probs. The module imports nothing of this project, because another
environment runs it with an older transformers.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

VOCAB: Final = 272
CONTEXT: Final = 256

#: Sizes by the names that the families' configurations use; a configuration gets those that it has.
_SIZES: Final[Mapping[str, Any]] = {
    # decoder
    "vocab_size": VOCAB, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "lru_width"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), CONTEXT),
    "num_key_value_heads": 2, "head_dim": 8, "n_inner": None, "rotary_dim": 4, "partial_rotary_factor": 1.0,
    "sliding_window": 6, "attention_window_size": 6, "window_size": 6, "attention_chunk_size": 8, "floor_scale": 4,
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace", "moe_layer_freq"), 1),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    # latent and linear attention, state spaces
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "qk_head_dim": 16, "index_topk": 4, "index_n_heads": 2, "index_head_dim": 8, "indexer_topk": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "state_size": 8, "ssm_state_size": 8, "expand": 2, "conv_kernel": 4, "n_groups": 1,
    "time_step_rank": 4, "chunk_size": 16, "mamba_d_state": 8, "mamba_d_head": 16, "mamba_n_heads": 4,
    "mamba_n_groups": 1, "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_d_ssm": 64, "mamba_expand": 2,
    "mamba_dt_rank": 4, "mamba_d_conv": 4, "mamba_chunk_size": 16, "use_mamba_kernels": False,
}  # fmt: skip
_LINEAR: Final = ["linear_attention", "full_attention", "linear_attention"]
_WINDOWED: Final = ["sliding_attention", "full_attention", "sliding_attention"]
_ALTERNATING: Final = ["sliding_attention", "full_attention"] * 2
_GEMMA4: Final[Mapping[str, Any]] = {
    "num_hidden_layers": 4, "layer_types": _ALTERNATING, "global_head_dim": 16, "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": VOCAB,
}  # fmt: skip
_VISION: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "out_hidden_size", "vision_output_dim"), 32),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "depth"), 1), **dict.fromkeys(("num_attention_heads", "num_heads"), 4),
    "num_key_value_heads": 4, "head_dim": 8, "image_size": 28, "patch_size": 14, "deepstack_visual_indexes": [0],
    "num_position_embeddings": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """How to build one family's model: its model_type, the settings it needs, and its text model if it sees images."""

    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    text: str | None = None


def _named(names):
    return {name: Family(name) for name in names.split()}


def _same(model_type, **settings):
    return Family(model_type, settings)


#: The families by name. Names that are no model_type are variants of one.
FAMILIES: Final[Mapping[str, Family]] = {
    **_named("llama qwen2 qwen2_moe qwen3 qwen3_moe qwen4_exp_text gemma mistral ministral mixtral phi phimoe"),
    **_named("olmo olmo2 olmoe flex_olmo glm glm4 glm4_moe minimax_m2 nemotron granitemoe granitemoeshared"),
    **_named("granite_swa falcon_h1 lfm3 mamba hunyuan_v1_dense hunyuan_v1_moe hy_v3 ernie4_5 ernie4_5_moe"),
    **_named("apertus gpt2 gptj gpt_bigcode bloom falcon stablelm arcee helium dots1 mellum afmoe laguna nanochat"),
    **_named("doge persimmon codegen mpt solar_open xlstm cwm jais2 biogpt xglm jetmoe exaone_moe"),
    **_named("bailing_hybrid mimo_v2_flash deepseek_v4 kimi_linear"),
    "modernbert-decoder": _same("modernbert-decoder", pad_token_id=0),
    "llama_tied": _same("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "qwen2_window": _same("qwen2", use_sliding_window=True, max_window_layers=1),
    "qwen3_next": _same("qwen3_next", layer_types=_LINEAR),
    "qwen3_5_text": _same("qwen3_5_text", layer_types=_LINEAR),
    "qwen3_5_moe_text": _same("qwen3_5_moe_text", layer_types=_LINEAR),
    "qwen3_5": Family("qwen3_5", text="qwen3_5_text"),
    "qwen3_5_moe": Family("qwen3_5_moe", text="qwen3_5_moe_text"),
    "olmo_hybrid": _same("olmo_hybrid", layer_types=_LINEAR),
    "olmo3": _same("olmo3", layer_types=_WINDOWED),
    "gemma2": _same("gemma2", query_pre_attn_scalar=8),
    "vaultgemma": _same("vaultgemma", query_pre_attn_scalar=8),
    "gemma3_text": _same("gemma3_text", layer_types=_WINDOWED),
    "qwen3_vl": Family("qwen3_vl", text="qwen3_vl_text"),
    "mistral3": Family("mistral3", text="ministral3"),
    "gemma3": Family("gemma3", {"mm_tokens_per_image": 4}, text="gemma3_text"),
    "gemma4_text": _same(
        "gemma4_text", **_GEMMA4, num_experts=None, top_k_experts=None, num_kv_shared_layers=2,
        hidden_size_per_layer_input=8, pad_token_id=0,
    ),
    "gemma4_moe": _same(
        "gemma4_text", **_GEMMA4, enable_moe_block=True, num_kv_shared_layers=0, hidden_size_per_layer_input=0,
        attention_k_eq_v=True, num_global_key_value_heads=1,
    ),
    "gemma4": Family("gemma4", {"audio_config": None}, text="gemma4_text"),
    "llama4_text": _same(
        "llama4_text", num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0], interleave_moe_layer_step=2,
        attn_temperature_tuning=True,
    ),
    "llama4": Family("llama4", text="llama4_text"),
    "phi3": _same("phi3", sliding_window=None),
    "ministral3": _same(
        "ministral3",
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
        },
    ),
    "smollm3": _same("smollm3", no_rope_layers=[1, 0, 1], use_sliding_window=False, sliding_window=None),
    "gpt_oss": _same("gpt_oss", layer_types=_WINDOWED),
    "gpt_neox": _same("gpt_neox", rotary_pct=0.5, hidden_dropout=0.1),
    "gpt_neo": _same("gpt_neo", attention_types=[[["global", "local", "local"], 1]]),
    "opt": _same("opt", dropout=0.1),
    "diffllama": _same("diffllama", attention_dropout=0.0),  # the only value that it accepts
    "seed_oss": _same("seed_oss", attention_dropout=0.1),
    "starcoder2": _same("starcoder2", attention_dropout=0.1),
    "granite": _same("granite", logits_scaling=4.0, embedding_multiplier=3.0, residual_multiplier=0.5),
    "granitemoehybrid": _same("granitemoehybrid", layer_types=["mamba", "attention", "mamba"]),
    "cohere": _same("cohere", logit_scale=0.25),
    "cohere2": _same("cohere2", logit_scale=0.25, layer_types=_WINDOWED),
    "exaone4": _same("exaone4", layer_types=_WINDOWED, sliding_window_pattern=None),
    **{
        name: _same(name, num_key_value_heads=4)
        for name in ("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "youtu")
    },
    "deepseek_v2": _same("deepseek_v2", num_key_value_heads=4, topk_method="greedy"),
    "longcat_flash": _same("longcat_flash", num_key_value_heads=4, num_layers=2),
    "minimax": _same("minimax", layer_types=_LINEAR),
    "nemotron_h": _same(
        "nemotron_h", layers_block_type=["linear_attention", "full_attention", "moe"], hybrid_override_pattern=None
    ),
    "jamba": _same("jamba", attn_layer_offset=1, attn_layer_period=2, expert_layer_offset=1, expert_layer_period=2),
    "bamba": _same("bamba", attn_layer_indices=[1]),
    "zamba2": _same("zamba2", layers_block_type=["mamba", "hybrid", "mamba"]),
    "mamba2": _same("mamba2", head_dim=16),
    "lfm2": _same("lfm2", layer_types=["conv", "full_attention", "conv"], full_attn_idxs=None),
    "lfm2_moe": _same("lfm2_moe", layer_types=["conv", "full_attention", "conv"], num_dense_layers=1),
    "rwkv": _same("rwkv", attention_hidden_size=32),
    "recurrent_gemma": _same("recurrent_gemma", block_types=["recurrent", "attention"]),
    "zaya": _same("zaya", num_experts_per_tok=1),
}  # fmt: skip


#: Text parts of models that see images, for which transformers has no causal language model.
_PARTS: Final[Mapping[str, Family]] = {
    "qwen3_vl_text": _same(
        "qwen3_vl_text", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    ),
}


def config_of(name, *, noise=0.0):
    """Return the configuration of a family's tiny model. Raises KeyError if this transformers does not know it.

    With `noise`, every dropout and jitter that the configuration offers has this value, so that a pass in train mode
    differs from one in evaluation mode.
    """
    from transformers import CONFIG_MAPPING

    family = (FAMILIES | _PARTS)[name]
    kind = CONFIG_MAPPING[family.model_type]
    if family.text is not None:
        return _seeing_config(kind, family)
    default = kind()
    known = {*getattr(kind, "__dataclass_fields__", ()), *getattr(kind, "attribute_map", ()), *default.to_dict()}
    renamed = getattr(kind, "attribute_map", {})
    settings = {key: value for key, value in _SIZES.items() if key in known or hasattr(default, key)}
    settings = {
        key: value for key, value in settings.items() if renamed.get(key, key) == key or renamed[key] not in settings
    }
    for derived in {"falcon": ["head_dim"], "xlstm": ["v_head_dim", "qk_head_dim"]}.get(name, ()):
        settings.pop(derived, None)  # a property there, which cannot be set
    random = [key for key, value in default.to_dict().items() if isinstance(value, float) and _is_noise(key)]
    return kind(**{**settings, **dict.fromkeys(random if noise else [], noise), **family.settings})


def _is_noise(setting):
    return "drop" in setting or "jitter" in setting


def _seeing_config(kind, family):
    from transformers import CONFIG_MAPPING

    default, text = kind(), config_of(str(family.text))
    vision = default.vision_config or CONFIG_MAPPING[f"{family.model_type}_vision"]()
    sizes = {key: value for key, value in _VISION.items() if key in vision.to_dict()}
    tokens = (key for key in default.to_dict() if key.endswith(("_token_id", "_token_index")) and "eos" not in key)
    places = {key: place for place, key in enumerate(sorted(tokens), start=3)}
    parts = {"text_config": text.to_dict(), "vision_config": {**sizes, "model_type": vision.model_type}}
    return kind(**parts, **places, **family.settings)


def save(path, name, *, noise=0.0):
    """Write a family's model to the directory `path`, without a tokenizer, and return `path`."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(3)
    config = config_of(name, noise=noise)
    factory: Any = AutoModelForImageTextToText if FAMILIES[name].text else AutoModelForCausalLM
    model = factory.from_config(config).eval()
    randomise(model)
    model.save_pretrained(path)
    return path


def randomise(model):
    """Give parameters and persistent buffers values that make each of them count in the log-probs."""
    generator = torch.Generator().manual_seed(5)
    state, parameters = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
    head = model.get_output_embeddings()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                parameter.add_(noise * 0.1)
            else:
                scale = 1.0 if "embed" in name or "wte" in name else 1.2 * parameter.shape[-1] ** -0.5
                parameter.copy_(noise * scale)
        for name, buffer in model.named_buffers():
            is_decay = name.endswith("_decay")  # MiniMax: noise would let tokens see later ones
            if name in state and name not in parameters and buffer.is_floating_point() and not is_decay:
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.2)
        if head is not None and head.weight is not model.get_input_embeddings().weight:
            head.weight.mul_(3.0)


def packed(part):
    """Return the families of text whose rows the trainer packs, and whose `part` works according to `records.json`."""
    records = json.loads(Path(__file__).with_name("records.json").read_text())["families"]
    found = {name: records.get(name, {}) for name, family in FAMILIES.items() if family.text is None}
    return [name for name, record in found.items() if (record.get("rows"), record.get(part)) == ("packed", "yes")]


def main(arguments):
    """Write the named families, or all, below a directory; leave out those that this transformers cannot build."""
    directory, *names = arguments
    for name in names or FAMILIES:
        try:
            save(Path(directory) / name, name)
        except Exception as error:  # each version of transformers fails in its own way
            print(f"{name}: {type(error).__name__}: {error}".splitlines()[0][:300], file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
