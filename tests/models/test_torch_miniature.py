"""Miniatures keep a model's architecture, and show where trainer or engine compute it otherwise than transformers."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DogeConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    NemotronConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    Starcoder2Config,
)

from pipelinerl.engines.torch import engine
from pipelinerl.errors import ModelError
from pipelinerl.models import torch_miniature
from pipelinerl.models.torch_miniature import Computed, miniature, reference, refuse_different, shrunk, texts_of
from pipelinerl.trainers.torch import packed_model
from pipelinerl.trainers.torch.packed.attention import IMPLEMENTATION

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 299,
    "eos_token_id": [298, 299],
}
HEADS: dict[str, Any] = {**SIZES, "head_dim": 8}
LAYER_TYPES = ["sliding_attention", "full_attention", "full_attention"]
EXPERTS: dict[str, Any] = {**SIZES, "num_experts_per_tok": 2}


def skeleton(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(), Gemma3TextConfig(), MixtralConfig(), Qwen2MoeConfig(), GPT2Config()],
    ids=lambda config: config.model_type,
)
def test_shrunk_configuration_keeps_each_kind_of_layer_and_the_widths_of_attention(config):
    small = shrunk(config)
    kinds, kept = getattr(config, "layer_types", None), getattr(small, "layer_types", None)
    assert 2 <= small.num_hidden_layers <= 8
    assert kinds is None or (set(kinds) == set(kept) and len(kept) == small.num_hidden_layers)
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        assert getattr(small, name, None) == getattr(config, name, None), name
    assert small.vocab_size <= 256 < config.vocab_size and (getattr(small, "sliding_window", None) or 0) <= 4


def test_miniature_is_the_same_each_time_and_leaves_torchs_random_state_alone():
    state = torch.get_rng_state()
    one, other = (miniature(skeleton(LlamaConfig(**SIZES))) for _ in range(2))
    assert one is not None and other is not None and torch.equal(torch.get_rng_state(), state)
    assert torch.equal(reference(one, texts_of(one)[0]), reference(other, texts_of(other)[0]))
    assert one.config.pad_token_id == 0 and len(one.model.layers) == 2


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        Gemma3TextConfig(
            **HEADS, sliding_window=32, layer_types=["sliding_attention", "full_attention"] * 1 + ["full_attention"]
        ),
        MixtralConfig(**EXPERTS, num_local_experts=4, sliding_window=16),
        Qwen2MoeConfig(**EXPERTS, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16),
        GPT2Config(vocab_size=3, n_embd=32, n_layer=3, n_head=4, n_positions=16),
    ],
    ids=lambda config: config.model_type,
)
def test_trainer_and_engine_compute_supported_models_as_transformers_does(config):
    model = skeleton(config)
    assert packed_model.choose_rows(model) == packed_model.choose_rows(model.base_model) == (IMPLEMENTATION, True)
    assert engine.refuse_different(model)


def test_model_that_the_engine_would_compute_otherwise_is_rejected_with_the_reason():
    for _ in range(2):  # the second sentence is the first one, kept
        with pytest.raises(
            ModelError, match="the model changes its attention mask, which this engine does not support"
        ):
            engine.refuse_different(skeleton(DogeConfig(**SIZES)))


@pytest.mark.parametrize(
    "config",
    [PhimoeConfig(**EXPERTS, num_local_experts=4, sliding_window=16), NemotronConfig(**HEADS)],
    ids=lambda config: config.model_type,
)
def test_engine_serves_models_whose_masks_or_layers_differ_from_llamas(config):
    assert engine.refuse_different(skeleton(config))


@pytest.mark.parametrize(
    ("config", "attention"),
    [
        (Gemma2Config(**HEADS), IMPLEMENTATION),
        (GraniteConfig(**SIZES, logits_scaling=4.0), IMPLEMENTATION),
        (PhimoeConfig(**EXPERTS, num_local_experts=4, sliding_window=16), IMPLEMENTATION),
        (NemotronConfig(**HEADS), None),
        (Llama4TextConfig(**HEADS, attention_chunk_size=4, intermediate_size_mlp=48), None),
        (MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2), None),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_trainer_packs_only_models_that_it_then_computes_as_transformers_does(config, attention):
    assert packed_model.choose_rows(skeleton(config)) == (attention, True)


def test_trainer_rejects_a_model_that_neither_rows_compute_as_transformers_does(monkeypatch):
    monkeypatch.setattr(torch_miniature, "_TOLERANCE", -1.0)
    with pytest.raises(ModelError, match="the torch trainer with own attention computes Starcoder2ForCausalLM otherw"):
        packed_model.choose_rows(skeleton(Starcoder2Config(**SIZES)))


def test_model_is_compared_with_the_right_tokens_and_within_rounding():
    def off_by(error):
        def compute(model):
            return [Computed(text, reference(model, text)[-3:] + error) for text in texts_of(model)]

        return compute

    model = skeleton(LlamaConfig(**SIZES))
    assert refuse_different(model, "exact", off_by(0.0)) and refuse_different(model, "rounded", off_by(1e-5))
    with pytest.raises(ModelError, match=r"wrong computes LlamaForCausalLM otherwise .* by up to 0\.5; use another"):
        refuse_different(model, "wrong", off_by(0.5))
    with pytest.raises(ModelError, match=r"broken cannot compute LlamaForCausalLM: .* by zero; use another model"):
        refuse_different(model, "broken", lambda model: [Computed((), torch.zeros(1 // 0))])


def test_configuration_whose_miniature_does_not_run_or_is_too_large_is_not_tried():
    wide = LlamaConfig(**SIZES | {"hidden_size": 1 << 16, "num_attention_heads": 1 << 9})
    assert miniature(skeleton(wide)) is None
    assert packed_model.choose_rows(skeleton(wide)) == (IMPLEMENTATION, False)
