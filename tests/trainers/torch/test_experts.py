"""Fused experts in a trainer: matmuls in autocast's dtype, gradients for the fp32 parameters."""

import pytest
import torch
from transformers import AutoModel

from pipelinerl.models.model_shape import REPLAYED
from pipelinerl.trainers.torch.experts import follow_autocast
from tests.fakes.mixtures import mixture_config


def experts_of(model):
    return next(module for module in model.modules() if type(module).__name__.endswith("Experts"))


@pytest.mark.parametrize("kind", sorted(REPLAYED))
def test_fused_experts_under_autocast_match_a_bf16_model_and_give_fp32_gradients(kind):
    torch.manual_seed(1)
    model = AutoModel.from_config(mixture_config(kind, 16)).eval()
    experts, hidden = experts_of(model), torch.randn(6, 32)
    index, weights = torch.tensor([[0, 2], [1, 3], [3, 0]] * 2), torch.full((6, 2), 0.5)
    exact = experts(hidden, index, weights)
    follow_autocast(model)
    torch.testing.assert_close(experts(hidden, index, weights), exact, rtol=0, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = experts(hidden, index, weights.bfloat16())
    got.float().sum().backward()
    for name, parameter in experts.named_parameters():
        assert parameter.dtype is torch.float32 and parameter.grad.dtype is torch.float32, name
        assert parameter.grad.abs().max() > 0
    with torch.no_grad():
        expected = experts_of(model.bfloat16())(hidden.bfloat16(), index, weights.bfloat16())
    assert got.dtype is torch.bfloat16 and torch.equal(got, expected)
    assert not torch.equal(got.float(), exact)
