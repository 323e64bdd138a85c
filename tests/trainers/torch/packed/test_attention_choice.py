"""Tests of how a trainer chooses its attention: the rule (without a GPU), the trial of kernels, and rejections."""

import logging

import pytest
import torch

from pipelinerl.trainers.torch.packed.attention_choice import (
    HeadShapes,
    SegmentAttention,
    chosen,
    described,
    why_not_varlen,
)
from pipelinerl.trainers.torch.packed.planner import failed_trial
from tests.fakes.torch_trainers import started
from tests.fakes.varlen_kernel import varlen_attention
from trainer_contract.errors import SpecError
from trainer_contract.types import Precision

FITS = {
    "device": "cuda",
    "precision": Precision.BF16,
    "capability": (9, 0),
    "has_kernel": True,
    "widths": frozenset({128}),
}
HEADS = HeadShapes(4, 2, frozenset({16}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"capability": (8, 0), "widths": frozenset({256})}, None),
        ({"capability": None}, None),
        ({"device": "cpu", "capability": None}, "the device is cpu, and the kernel needs CUDA"),
        ({"precision": Precision.FP32}, "the precision is fp32, and the kernel needs bf16"),
        ({"has_kernel": False}, "this torch was built without flash attention"),
        ({"capability": (7, 5)}, "the GPU's compute capability is 7.5, and the kernel needs 8.0"),
        (
            {"widths": frozenset({128, 64})},
            "the model's heads are of several widths (64, 128), and the kernel needs one",
        ),
        ({"widths": frozenset()}, "the model's heads are of several widths (unknown), and the kernel needs one"),
        ({"widths": frozenset({100})}, "the model's heads are 100 wide, and the kernel takes multiples of 8 up to 256"),
        ({"widths": frozenset({512})}, "the model's heads are 512 wide, and the kernel takes multiples of 8 up to 256"),
    ],
)
def test_auto_attention_uses_the_varlen_kernel_or_else_buckets_and_names_the_condition_that_failed(change, reason):
    why_not = why_not_varlen(**FITS | change)
    assert why_not == reason
    auto, buckets, varlen = SegmentAttention
    assert chosen(auto, why_not) is (varlen if reason is None else buckets)
    assert chosen(buckets, why_not) is buckets
    if reason is None:
        assert chosen(varlen, None) is varlen
        assert described(buckets, None) == "buckets of segments of similar length (set by options.attention)"
    else:
        assert described(auto, why_not) == f"buckets of segments of similar length ({reason})"
        with pytest.raises(SpecError) as refused:
            chosen(varlen, why_not)
        assert (
            str(refused.value) == f'options.attention = "varlen" is not possible: {reason}; use "auto", or leave it out'
        )


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        ({"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}, (4, 2, {8})),
        ({"hidden_size": 32, "num_attention_heads": 4, "head_dim": 16, "linear_key_head_dim": 64}, (4, 4, {16})),
        ({"n_embd": 32, "n_head": 2, "head_dim": None}, (2, 2, {16})),
        ({"num_attention_heads": 4, "qk_nope_head_dim": 128, "v_head_dim": 64}, (4, 4, {128, 64})),
        ({"num_attention_heads": [4, 8]}, (0, 0, set())),
    ],
)
def test_number_and_width_of_attention_heads_are_read_from_a_model_config(config, heads):
    assert HeadShapes.of(config) == heads


def tried(kernel):
    return failed_trial(kernel, heads=HEADS, device=torch.device("cpu"), dtype=torch.float32)


def test_trial_run_of_an_attention_kernel_detects_only_faults():
    def with_its_triangle_at_the_beginning(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **named):
        ends = cu_seq_k[:-1] + cu_seq_q.diff()
        first = torch.cat([torch.arange(*each) for each in zip(cu_seq_k[:-1], ends, strict=True)])
        return varlen_attention(query, key[first], value[first], cu_seq_q, cu_seq_q, max_q, max_q, **named)

    def that_sees_one_too_many(*given, window_size, **named):
        return varlen_attention(*given, window_size=(window_size[0] + (window_size[0] > 0), 0), **named)

    def without_a_gradient_of_keys(query, key, *others, **named):
        return varlen_attention(query, key.detach() + 0 * key, *others, **named)

    def that_is_not_there(*given, **named):
        raise RuntimeError("no kernel image is available\nlong story")

    assert tried(varlen_attention) is None
    assert tried(that_is_not_there) == "in its trial the kernel failed: no kernel image is available"
    for kernel in (with_its_triangle_at_the_beginning, that_sees_one_too_many, without_a_gradient_of_keys):
        reason = tried(kernel)
        assert reason is not None and reason.startswith("in its trial the kernel's result differed from buckets by "), (
            kernel
        )


def test_trainer_logs_its_attention_choice_and_rejects_an_unusable_kernel(model_path, caplog):
    path = model_path("qwen3")
    with caplog.at_level(logging.INFO, "pipelinerl"):
        started(path)
    assert "attention: buckets of segments of similar length (the device is cpu, and the kernel needs CUDA)" in (
        caplog.messages
    )
    with pytest.raises(SpecError, match=r'^options\.attention = "varlen" is not possible: the device is cpu, and'):
        started(path, options={"attention": "varlen"})
    with pytest.raises(SpecError, match=r"^options\.attention must be auto or buckets or varlen, got 'flash'"):
        started(path, options={"attention": "flash"})
