"""The JAX decoder computes what Hugging Face's models compute (in fp32), and loads and exports their weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Qwen2Config,
    Qwen3Config,
)

from pipelinerl.errors import ModelError
from pipelinerl.models.decoder_config import read_config
from pipelinerl.plugins.jax.decoder import (
    bound_memory,
    grouped_attention,
    hidden_states,
    load_weights,
    output_embedding,
)
from pipelinerl.rng import generator
from tests.fakes.jax_models import exported

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = {
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "llama": lambda: LlamaConfig(**SIZES),
    "llama3": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3),
    "mistral": lambda: MistralConfig(**SIZES, head_dim=8, sliding_window=None),
    "mistral_window": lambda: MistralConfig(**SIZES, head_dim=8, sliding_window=7),
    "qwen2_window": lambda: Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "olmo2": lambda: Olmo2Config(**SIZES, pad_token_id=0),
    "olmo3": lambda: Olmo3Config(**SIZES, pad_token_id=0, **WINDOWS, rope_scaling=YARN),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, head_dim=16, query_pre_attn_scalar=24, **WINDOWS, rope_scaling={"rope_type": "linear", "factor": 8.0}
    ),
}


@pytest.fixture
def saved(tmp_path):
    """Return a function that makes a random model by its name in `CONFIGS`, with large weights, biases and norms.

    The function returns the model and the directory in which it is saved.
    """

    def make(name):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(5.0)
                else:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path)
        return model, tmp_path

    return make


def loaded(path, **options):
    config = read_config(path)
    everywhere = SingleDeviceSharding(jax.devices("cpu")[0])
    return config, load_weights(path, config, place=lambda _: everywhere, **options)


def causal(query, key, value, state, reach=10**6):
    distance = jnp.arange(query.shape[1])[:, None] - jnp.arange(query.shape[1])
    return grouped_attention(query, key, value, ((distance >= 0) & (distance < reach))[None]), state


@pytest.mark.parametrize("name", CONFIGS)
def test_jax_decoder_logprobs_equal_those_of_hugging_face(name, saved):
    model, path = saved(name)
    tokens = generator(0, name).integers(0, 48, (2, 60))
    config, weights = loaded(path)
    positions = jnp.broadcast_to(jnp.arange(60), (2, 60))
    hidden, _ = hidden_states(config, weights, jnp.asarray(tokens), positions, causal)
    ours = jax.nn.log_softmax(hidden @ output_embedding(weights).T)
    theirs = torch.log_softmax(model(torch.from_numpy(tokens)).logits, -1).detach().numpy()
    assert np.abs(np.asarray(ours) - theirs).max() <= 1e-5


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_weights_exported_from_the_jax_decoder_equal_the_loaded_weights(name, saved):
    model, path = saved(name)
    config, weights = loaded(path)
    got = exported(config, weights, dtype=np.float32)
    parameters = dict(model.named_parameters())
    assert got.keys() == parameters.keys()
    assert all(np.array_equal(got[name], parameters[name].detach().numpy()) for name in got)
    layers = [name.split(".")[2] for name in got if name.startswith("model.layers.")]
    assert layers == sorted(layers), "layer by layer"


def test_jax_decoder_loads_weights_from_several_files_and_in_bfloat16(saved):
    model, path = saved("llama")
    model.to(torch.bfloat16).save_pretrained(path, max_shard_size="10KB")
    assert len(list(path.glob("model-*.safetensors"))) > 1
    (path / "model.safetensors").unlink(missing_ok=True)
    config, weights = loaded(path)
    got = exported(config, weights, dtype=jnp.dtype(config.dtype))
    assert config.dtype == "bfloat16" and {str(array.dtype) for array in got.values()} == {"bfloat16"}
    for name, parameter in model.named_parameters():
        assert np.array_equal(got[name].astype(np.float32), parameter.float().detach().numpy())


def test_jax_decoder_does_not_load_the_stored_output_head_of_a_model_with_tied_embeddings(saved):
    _, path = saved("qwen2")
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}, path / "model.safetensors")
    config, weights = loaded(path)
    assert "lm_head.weight" not in weights and config.tied


def without(tensors, name):
    return {other: tensor for other, tensor in tensors.items() if other != name}


UP = "model.layers.1.mlp.up_proj.weight"
BROKEN = {
    f"the tensor '{UP}' is missing": lambda tensors: without(tensors, UP),
    rf"'{UP}' must have the shape \(40, 32\) by config.json, got \(32, 40\)": lambda tensors: (
        tensors | {UP: np.ascontiguousarray(tensors[UP].T)}
    ),
    "'model.layers.0.self_attn.q_proj.bias' is no part of a llama": lambda tensors: (
        tensors | {"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}
    ),
}


@pytest.mark.parametrize("sentence", BROKEN)
def test_jax_decoder_rejects_weights_that_do_not_match_the_config(sentence, saved):
    _, path = saved("llama")
    save_file(BROKEN[sentence](load_file(path / "model.safetensors")), path / "model.safetensors")
    with pytest.raises(ModelError, match=sentence):
        loaded(path)


def test_jax_decoder_rejects_a_damaged_weight_file(saved):
    _, path = saved("llama")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="damaged"):
        loaded(path)


@pytest.mark.parametrize(
    ("before", "share", "passed_to_xla"),
    [
        ({}, 0.45, 0.45),
        ({}, None, None),
        ({"XLA_CLIENT_MEM_FRACTION": "0.3"}, 0.45, 0.3),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2"}, 0.45, 0.2),
    ],
)
def test_memory_share_of_the_recipe_is_passed_to_xla_unless_the_environment_sets_it(
    before, share, passed_to_xla, monkeypatch
):
    xla_client = pytest.importorskip("jaxlib.xla_client")
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores the variable
        monkeypatch.delenv(name)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    bound_memory(share)
    assert xla_client.generate_pjrt_gpu_plugin_options().get("memory_fraction") == passed_to_xla
