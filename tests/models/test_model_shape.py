"""The number of layers with experts, and of experts, is read from config.json of a mixture-of-experts model."""

import json
from typing import Any

import numpy as np
import pytest

from pipelinerl.errors import ModelError
from pipelinerl.models.model_shape import mixture_of, read_shape, replayed_routing
from tests.families import zoo
from trainer_contract.types import RoutingShape

QWEN3: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def written(path, **table):
    (path / "config.json").write_text(json.dumps(table))
    return path


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, 4),
        ({"mlp_only_layers": [0, 3]}, 2),
        ({"decoder_sparse_step": 2}, 2),
        ({"first_k_dense_replace": 3}, 1),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}, 3),
        ({"num_experts": None, "num_local_experts": 8}, 4),
        ({"num_experts": None, "n_routed_experts": 8}, 4),
        ({"num_experts": None, "text_config": {**QWEN3, "num_hidden_layers": 3}}, 3),
    ],
)
def test_number_of_routed_layers_in_a_config_counts_only_layers_with_experts(changes, layers, tmp_path):
    assert mixture_of(written(tmp_path, **{**QWEN3, **changes})) == RoutingShape(layers, experts=8, top_k=2)


@pytest.mark.parametrize("changes", [{"num_experts": None}, {"num_experts": 1}, {"mlp_only_layers": [0, 1, 2, 3]}])
def test_model_that_never_chooses_among_experts_is_not_treated_as_a_mixture_of_experts(changes, tmp_path):
    path = written(tmp_path, **{**QWEN3, **changes})
    assert mixture_of(path) is None
    with pytest.raises(ModelError, match="of type 'qwen3_moe', has no experts whose routing could be replayed"):
        replayed_routing(path)


def test_replaying_the_routing_of_a_model_with_unknown_routers_is_rejected(tmp_path):
    assert replayed_routing(written(tmp_path, **QWEN3)) == RoutingShape(4, 8, 2)
    with pytest.raises(ModelError, match="olmoe, qwen2_moe, qwen3_moe, not for the routers of 'deepseek_v3'"):
        replayed_routing(written(tmp_path, **{**QWEN3, "model_type": "deepseek_v3"}))


def test_incomplete_config_of_a_mixture_of_experts_model_is_rejected(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json names 8 experts, and none of num_experts_per_tok, moe_k, "):
        mixture_of(written(tmp_path, **{name: value for name, value in QWEN3.items() if name != "num_experts_per_tok"}))


def test_expert_numbers_take_one_byte_for_few_experts_and_two_for_many():
    assert RoutingShape(layers=48, experts=128, top_k=8).bytes_per_token == 384
    assert RoutingShape(layers=48, experts=256, top_k=8).dtype == np.uint8
    assert RoutingShape(layers=48, experts=257, top_k=8).bytes_per_token == 768


@pytest.mark.parametrize("name", ["mamba2", "nemotron_h"])
def test_sizes_of_models_without_usual_names_or_without_attention_are_read(tmp_path, name):
    shape = read_shape(zoo.save(tmp_path, name))
    assert (shape.layers, shape.hidden, shape.vocab) == (3, 32, zoo.VOCAB)
