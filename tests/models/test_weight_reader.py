"""Parameters that are read from files one by one are bit-identical to those of a model that is loaded whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import load_model, load_structure
from pipelinerl.models.weight_reader import WeightReader

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
#: In this order, models with tied embeddings; with untied embeddings and scaled RoPE; with Conv1D layers; with
#: buffers for embeddings; with experts whose weights are stored separately.
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "gpt2": lambda: GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gemma2": lambda: Gemma2Config(**SIZES, head_dim=8),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
}


def saved(path, config, **options):
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(path, **options)
    return path


@pytest.mark.parametrize(
    ("name", "part"), [*((name, "causal_lm") for name in CONFIGS), ("llama", "trunk"), ("gpt2", "trunk")]
)
def test_parameters_read_one_by_one_equal_those_of_a_loaded_model(name, part, tmp_path):
    path = saved(tmp_path, CONFIGS[name](), max_shard_size="20KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    whole, random = load_model(path, part=part), torch.get_rng_state()
    model = load_structure(path, part=part)
    reader = WeightReader.of(path, model)
    assert reader is not None and torch.equal(torch.get_rng_state(), random)
    parameters = dict(whole.named_parameters())
    assert [key for key, _ in model.named_parameters()] == list(parameters)
    for key, parameter in model.named_parameters():
        expected = parameters[key].detach()
        assert parameter.is_meta and (parameter.dtype, parameter.shape) == (expected.dtype, expected.shape)
        assert torch.equal(reader.whole(key).float(), expected), key
        half = len(expected) // 2
        parts = [reader.rows(key, slice(0, half)), reader.rows(key, slice(half, len(expected)))]
        assert [len(each) for each in parts] == [half, len(expected) - half]
        assert torch.equal(torch.cat(parts).float(), expected), key
    buffers = dict(whole.named_buffers())
    assert [key for key, _ in model.named_buffers()] == list(buffers)
    for key, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[key]) and buffer.dtype == buffers[key].dtype, key


def test_parameters_cannot_be_read_one_by_one_if_both_of_two_tied_parameters_are_stored(tmp_path):
    path = saved(tmp_path, CONFIGS["qwen2"]())
    file = path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    assert WeightReader.of(path, load_structure(path)) is None
    save_file({("lm_head.weight" if "embed" in key else key): each for key, each in tensors.items()}, file)
    reader = WeightReader.of(path, load_structure(path))
    assert reader is not None, "under the other name alone"
    assert torch.equal(reader.whole("model.embed_tokens.weight"), tensors["model.embed_tokens.weight"])


def test_error_for_a_missing_weight_file_names_the_file(tmp_path):
    path = saved(tmp_path, CONFIGS["qwen2"]())
    reader = WeightReader.of(path, load_structure(path))
    assert reader is not None
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read: .*; copy it again"):
        reader.rows("model.norm.weight", slice(0, 1))
