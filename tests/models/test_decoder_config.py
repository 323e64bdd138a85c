"""The JAX decoder's config is read from config.json, in current and older formats; unsupported features are named."""

import json

import pytest

from pipelinerl.errors import ModelError
from pipelinerl.models.decoder_config import Rotary, read_config

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
OLD_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, **SIZES}


def read(folder, table):
    (folder / "config.json").write_text(json.dumps(table))
    return read_config(folder)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("table", "rotary"),
    [
        ({}, Rotary()),
        ({"rope_theta": 1e6}, Rotary(theta=1e6)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}, Rotary(theta=5e5, factor=4.0)),
        (
            {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
            Rotary(theta=5e5, factor=8.0, original_positions=64, low_freq_factor=1.0, high_freq_factor=4.0),
        ),
    ],
)
def test_settings_of_rotary_embeddings_are_read_in_current_and_old_formats(table, rotary, tmp_path):
    assert read(tmp_path, OLD_LLAMA | table).rotary == rotary


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (
            {"model_type": "gpt2"},
            "the architecture 'gpt2' is not supported by the JAX decoder; it supports llama, mistral",
        ),
        ({"model_type": "qwen3_moe"}, "'qwen3_moe' is not supported"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layers of type chunked_attention"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "capped scores or logits"),
        ({"model_type": "gemma3_text", "hidden_activation": "silu"}, "the activation 'silu'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "the rotary scaling 'longrope'"),
        ({"partial_rotary_factor": 0.5}, "a part of each head"),
        ({"hidden_act": "gelu"}, "the activation 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"vocab_size": None}, "vocab_size in .* must be a whole number"),
    ],
)
def test_config_with_features_that_the_jax_decoder_does_not_support_is_rejected(table, sentence, tmp_path):
    with pytest.raises(ModelError, match=sentence):
        read(tmp_path, OLD_LLAMA | table)


@pytest.mark.parametrize(
    ("table", "slides"),
    [
        ({"model_type": "mistral", "sliding_window": 5}, (True, True, True)),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
            (False, True, True),
        ),
        ({"model_type": "olmo3", "sliding_window": 5, "num_hidden_layers": 5}, (True, True, True, False, True)),
        ({"model_type": "gemma3_text", "sliding_window": 5, "sliding_window_pattern": 2}, (True, False, True)),
        (
            {
                "model_type": "gemma3_text",
                "sliding_window": 5,
                "layer_types": ["full_attention"] * 2 + ["sliding_attention"],
            },
            (False, False, True),
        ),
    ],
)
def test_layers_with_a_sliding_window_are_read_in_current_and_old_formats(table, slides, tmp_path):
    config = read(tmp_path, OLD_LLAMA | {"hidden_act": None} | table)
    assert config.slides == slides and config.window == 5
    own = config.local_rotary
    assert (own is not None and own.factor == 1.0) if table["model_type"] == "gemma3_text" else True


def test_config_with_a_sliding_window_that_no_layer_uses_is_accepted(tmp_path):
    for table in (
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 3},
    ):
        assert read(tmp_path, OLD_LLAMA | table).layers == 3


def test_decoder_config_with_a_missing_key_or_file_is_rejected(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json must be a JSON object"):
        read_config(tmp_path)
    with pytest.raises(ModelError, match="is incomplete or damaged: 'hidden_size'"):
        read(tmp_path, {name: value for name, value in OLD_LLAMA.items() if name != "hidden_size"})
