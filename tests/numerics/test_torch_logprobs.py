"""The output layer in fp32 computes exact products of the engines' rounded weights, with an unrounded gradient."""

import pytest
import torch
from torch import nn

from pipelinerl.numerics import torch_logprobs


class Model:
    """A fake Hugging Face model with only the methods that the output layer needs."""

    def __init__(self, head):
        self.get_output_embeddings = lambda: head
        self.named_parameters = lambda: ((f"lm_head.{name}", each) for name, each in head.named_parameters())


def head(dtype, *, bias):
    noise = torch.Generator().manual_seed(0)
    layer = nn.Linear(64, 33, bias=bias)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=noise))
    return layer.to(dtype)


HIDDEN = torch.randn(7, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bias", [False, True])
def test_fp32_output_layers_of_engine_and_trainer_give_the_same_logits(bias):
    """The engine has bf16 weights; the trainer has fp32 weights under autocast that round to the same values."""
    trainer, engine = head(torch.float32, bias=bias), head(torch.bfloat16, bias=bias)
    for layer in (trainer, engine):
        torch_logprobs.to_fp32(Model(layer), served=torch.bfloat16)
    hidden = HIDDEN.to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = trainer(hidden)
    theirs = engine(hidden)
    assert ours.dtype == theirs.dtype == torch.float32
    assert torch.equal(ours, theirs)
    exact = hidden.double() @ engine.weight.double().T + (engine.bias.double() if bias else 0.0)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)
    assert (engine.weight.double() - trainer.weight.double()).abs().max() > 1e-3, "rounding must matter"


def test_gradient_of_the_fp32_output_layer_ignores_the_rounding_of_its_weights():
    layer = head(torch.float32, bias=False)
    torch_logprobs.to_fp32(Model(layer), served=torch.bfloat16)
    coefficients = torch.randn(7, 33, generator=torch.Generator().manual_seed(2))
    (layer(HIDDEN) * coefficients).sum().backward()
    torch.testing.assert_close(layer.weight.grad, coefficients.T @ HIDDEN, rtol=1e-6, atol=1e-6)
