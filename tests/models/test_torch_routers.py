"""Replaying the experts that a router chose, for each supported model family: outputs and the router's gradient."""

import pytest
import torch
from transformers import AutoModel

from pipelinerl.models import torch_routers
from pipelinerl.models.model_shape import REPLAYED, read_shape
from tests.fakes.mixtures import ROUTING, mixture_config

TOKENS = 6


@pytest.fixture(params=sorted(REPLAYED))
def model(request):
    torch.manual_seed(5)
    made = AutoModel.from_config(mixture_config(request.param, 16)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(5.0)
    return made


def hidden_of(model):
    tokens = torch.arange(TOKENS)[None] % 16
    return model(input_ids=tokens, use_cache=False).last_hidden_state[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replaying_a_routers_own_choice_of_experts_gives_bit_identical_outputs(model, dtype):
    assert torch_routers.shape_of(model) == ROUTING
    log = torch_routers.TorchRouteLog(model.to(dtype), ROUTING)
    log.is_on = True
    with torch.no_grad():
        own = hidden_of(model)
        chosen = log.take()
        assert chosen.shape == (TOKENS, ROUTING.layers, ROUTING.top_k) and chosen.dtype == ROUTING.dtype
        log.is_on = False
        replay = torch_routers.ReplayedRouters(model)
        replay.tell(torch.from_numpy(chosen.astype("int32")))
        assert torch.equal(hidden_of(model), own)
        replay.tell(torch.from_numpy((chosen.astype("int32") + 1) % ROUTING.experts))
        assert not torch.equal(hidden_of(model), own)
        replay.tell(None)
        assert torch.equal(hidden_of(model), own)


def test_router_gets_a_gradient_when_its_choice_of_experts_is_replayed(model):
    """The weights of the replayed experts are computed from the router's logits, so the router gets a gradient."""
    replay = torch_routers.ReplayedRouters(model)
    replay.tell(torch.tensor([[[0, 3], [2, 1]]] * TOKENS))
    hidden_of(model).sum().backward()
    for router in torch_routers.routers_of(model):
        assert router.weight.grad.abs().max() > 0


def test_parameter_shapes_read_from_a_directory_equal_those_of_the_loaded_model(model, tmp_path):
    """In files, each expert has matrices of its own; in a loaded model, a layer has all experts in two parameters."""
    model.save_pretrained(tmp_path)
    read_shapes = read_shape(tmp_path).parameters
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    renamed = {
        name.replace(".block_sparse_moe.", ".mlp.").removeprefix("model."): each for name, each in read_shapes.items()
    }
    assert renamed == shapes
    assert read_shape(tmp_path).largest == max(parameter.numel() for parameter in model.parameters())


def test_model_without_supported_routers_has_no_routing_shape():
    assert torch_routers.shape_of(torch.nn.Linear(2, 2)) is None
