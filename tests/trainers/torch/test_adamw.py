"""AdamW with bf16 moments or with its state on the host, compared with torch's AdamW."""

import pytest
import torch
from torch import nn

from pipelinerl.trainers.torch import adamw as module
from pipelinerl.trainers.torch.adamw import (
    PiecewiseAdamW,
    adamw,
    restored_state,
    rounded_at_random,
)
from pipelinerl.trainers.torch.options import (
    MomentDType,
    OptimizerOptions,
    StatePlace,
    optimizer_of,
)
from trainer_contract.errors import SpecError
from trainer_contract.types import OptimizerSpec

SPEC = OptimizerSpec(weight_decay=0.1)
HOST = OptimizerOptions(place=StatePlace.HOST)
BF16 = OptimizerOptions(moments=MomentDType.BF16)


def parameters():
    draw = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=draw)) for shape in ((13, 7), (29,), (3, 5))]


def stepped(optimizer, trained, steps):
    """Take the steps; return the parameters after each step. The last parameter never has a gradient."""
    snapshots = []
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        for parameter in trained[:-1]:
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        optimizer.step()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in trained)
        snapshots.append(torch.cat([each.detach().flatten().clone() for each in trained]))
    return snapshots


@pytest.mark.parametrize("options", [OptimizerOptions(), HOST], ids=["torch", "host"])
def test_optimizer_without_parameters_takes_steps(options):
    adamw([], SPEC, options, seed=0).step()


def test_20_adamw_steps_with_state_on_the_host_match_torch(monkeypatch):
    monkeypatch.setattr(module, "_PIECE", 16)  # pieces that do not divide the parameters evenly
    theirs, ours = parameters(), parameters()
    expected = stepped(adamw(theirs, SPEC, OptimizerOptions(), seed=0), theirs, range(20))
    optimizer = adamw(ours, SPEC, HOST, seed=0)
    assert isinstance(optimizer, PiecewiseAdamW)
    for actual, each in zip(stepped(optimizer, ours, range(20)), expected, strict=True):
        torch.testing.assert_close(actual, each, rtol=2e-6, atol=1e-7)
    assert [int(its["step"]) for its in optimizer.state.values()] == [20, 20], "what has no gradient is left alone"


def test_stochastic_rounding_picks_a_bf16_neighbour_and_keeps_the_mean():
    draw = torch.Generator().manual_seed(0)
    values = torch.tensor([1.0, -1.0, 1.001, -1.001, 3.1e-5, 0.0, 1.9921875])
    lower = (values.view(torch.int32) & ~0xFFFF).view(torch.float32)
    upper = ((values.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32)
    many = values.repeat(20_000, 1)
    drawn = torch.empty(many.shape, dtype=torch.int32).random_(-(2**31), 2**31, generator=draw)
    rounded = rounded_at_random(many.clone(), drawn).float()
    assert ((rounded == lower) | (rounded == upper)).all()
    exact = values == lower
    assert exact.tolist() == [True, True, False, False, False, True, True]
    assert (rounded[:, exact] == values[exact]).all(), "what bf16 has stays"
    error = (rounded.double().mean(0) - values.double()).abs()
    assert (error <= 4 * (upper - lower).abs().double() / 20_000**0.5 / 2).all()


def test_bf16_second_moment_decays_at_the_right_rate():
    """With a decay of 0.999 per step, rounding to nearest would never change the moment."""
    spec, trained = OptimizerSpec(betas=(0.9, 0.999)), [nn.Parameter(torch.zeros(64, 64))]
    optimizer = adamw(trained, spec, BF16, seed=0)
    trained[0].grad = torch.ones(64, 64)
    optimizer.step()
    square = optimizer.state[trained[0]]["exp_avg_sq"]
    assert square.dtype is torch.bfloat16
    assert torch.equal((square.float() * 0.999).bfloat16(), square), "to the nearest"
    began = float(square.float().mean())
    for _ in range(100):
        trained[0].grad = torch.zeros(64, 64)
        optimizer.step()
    left = float(optimizer.state[trained[0]]["exp_avg_sq"].float().mean()) / began
    assert abs(left / 0.999**100 - 1) < 0.01


@pytest.mark.parametrize(
    "options", [HOST, BF16, OptimizerOptions(moments=MomentDType.BF16, place=StatePlace.HOST)], ids=str
)
def test_restored_optimizer_state_continues_bit_for_bit(options):
    whole, parted = parameters(), parameters()
    expected = stepped(adamw(whole, SPEC, options, seed=3), whole, range(8))[-1]
    first = adamw(parted, SPEC, options, seed=3)
    stepped(first, parted, range(5))
    second = adamw(parted, SPEC, options, seed=3)
    for parameter, its in first.state.items():
        second.state[parameter] = restored_state({name: each.clone() for name, each in its.items()}, parameter, options)
    assert torch.equal(stepped(second, parted, range(5, 8))[-1], expected)


def test_stochastic_rounding_is_identical_on_processes_that_hold_the_same_rows():
    results = []
    for shard in (0, 0, 1):
        trained = parameters()
        results.append(stepped(adamw(trained, SPEC, BF16, seed=0, shard=shard), trained, range(5))[-1])
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"moments": "int8"}, "options.optimizer.moments must be fp32 or bf16, got 'int8'"),
        ({"place": 1}, "options.optimizer.place must be device or host, got 1"),
        ({"where": "host"}, "options.optimizer.where is unknown to the torch trainer; it knows moments, place"),
        ("host", "options.optimizer must be a table, got 'host'"),
    ],
)
def test_invalid_optimizer_options_are_rejected_by_name(given, sentence):
    with pytest.raises(SpecError) as refused:
        optimizer_of({"optimizer": given})
    assert str(refused.value) == sentence
