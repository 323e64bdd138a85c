"""Attention in one variable-length kernel, compared with bucket attention in fp32; on a CPU, a fake kernel is used.

The first test compares the fake with torch's attention; the last compares the real kernel with buckets, on a GPU.
"""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AutoModel

from pipelinerl.trainers.torch.loading import load
from pipelinerl.trainers.torch.packed.attention import IMPLEMENTATION, Scores, attend
from pipelinerl.trainers.torch.packed.attention_choice import HeadShapes
from pipelinerl.trainers.torch.packed.planner import failed_trial
from pipelinerl.trainers.torch.packed.segments import SegmentPlan
from pipelinerl.trainers.torch.packed.sequence_parallel import SequenceGroup
from pipelinerl.trainers.torch.packed.shared_beginnings import Distinct
from pipelinerl.trainers.torch.packed.varlen import VarlenPlan, for_fewer_key_heads, torch_kernel, with_sinks
from pipelinerl.trainers.torch.packed_model import hidden_states
from pipelinerl.trainers.torch.passes import PassSetting, predict
from tests.fakes.varlen_kernel import VarlenOperators, varlen_attention
from tests.patience import PATIENCE_S
from trainer_contract.types import Device, TrainerSpec

CPU = torch.device("cpu")
varlen = partial(VarlenPlan.of, kernel=varlen_attention)


def starts(lengths):
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_fake_varlen_kernel_matches_torch_attention_computed_segment_by_segment(kv_heads, window):
    """If a segment has fewer queries than keys, these are the queries of its last tokens; only they are compared."""
    queries, keys, draw = [3, 1, 9, 2], [3, 7, 9, 30], torch.Generator().manual_seed(0)
    whole, *kv = (torch.randn(sum(keys), heads, 8, generator=draw) for heads in (4, kv_heads, kv_heads))
    last = torch.cat([torch.arange(end - own, end) for own, end in zip(queries, np.cumsum(keys), strict=True)])
    got = varlen_attention(
        *(whole[last], *kv, starts(queries), starts(keys), 9, 30),
        scale=0.3,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=kv_heads != 4,
        sinks=None,
    )
    wanted = []
    for first, end in pairwise(starts(keys).tolist()):
        q, k, v = (each[first:end].transpose(0, 1) for each in (whole, *kv))
        distance = torch.arange(end - first)[:, None] - torch.arange(end - first)
        mask = (distance >= 0) & (distance < (window or end))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
        wanted.append(out.transpose(0, 1))
    torch.testing.assert_close(got, torch.cat(wanted)[last], rtol=0, atol=1e-6)


def old_varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    """Fake kernel with the signature of torch 2.11's kernel, which needs as many key heads as query heads."""
    bounds = (cu_seq_q, cu_seq_k, max_q, max_k)
    return varlen_attention(
        query, key, value, *bounds, scale=scale, window_size=window_size, enable_gqa=False, sinks=None
    )


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_kernel_without_grouped_query_attention_gets_repeated_key_heads(kv_heads):
    draw = torch.Generator().manual_seed(0)
    drawn = [torch.randn(13, heads, 8, generator=draw, requires_grad=True) for heads in (4, kv_heads, kv_heads)]
    results = []
    for kernel in (partial(varlen_attention, sinks=None), for_fewer_key_heads(old_varlen_attn)):
        settings = {"scale": None, "window_size": (-1, 0), "enable_gqa": kv_heads != 4}
        out = kernel(*drawn, starts([9, 4]), starts([9, 4]), 9, 9, **settings)
        results.append((out, *torch.autograd.grad(out.square().sum(), drawn)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert for_fewer_key_heads(varlen_attention) is varlen_attention, "a kernel that groups heads is used as it is"


def attended(plan, drawn, cotangent, window):
    """Return the output of attention, and the gradients of query, key, value, and sinks if there are any."""
    q, k, v = (each.squeeze(0).transpose(0, 1) for each in drawn[:3])
    out = plan.attend(q, k, v, Scores(window, 0.4, sinks=drawn[3] if len(drawn) > 3 else None))[None]
    return out, *torch.autograd.grad(out, drawn, cotangent)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", ["ragged", "shared", "branching"])
def test_varlen_attention_matches_bucket_attention_in_value_and_gradient(name, window, has_sinks, request, micro_batch):
    """With sinks, the fake has the two operators behind torch's kernel, which know none."""
    batch = micro_batch((3, 1, 8, 40, 5)) if name == "ragged" else request.getfixturevalue(name)
    distinct, draw = Distinct.of(batch), torch.Generator().manual_seed(0)
    count = len(distinct.kept)
    drawn = [torch.randn(1, heads, count, 8, generator=draw, requires_grad=True) for heads in (4, 2, 2)]
    if has_sinks:
        drawn.append(torch.randn(4, generator=draw, requires_grad=True))
    cotangent = torch.randn(1, count, 4, 8, generator=draw)
    kernel = with_sinks(varlen_attention, VarlenOperators)
    plans = (make(batch.position_ids, CPU, distinct) for make in (SegmentPlan.of, partial(varlen, kernel=kernel)))
    wanted, got = (attended(plan, drawn, cotangent, window) for plan in plans)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_varlen_attention_under_autocast_matches_buckets_in_bf16(shared):
    draw, count = torch.Generator().manual_seed(0), shared.num_tokens
    drawn = [torch.randn(1, heads, count, 8, generator=draw, requires_grad=True) for heads in (4, 2, 2)]
    cotangent = torch.randn(1, count, 4, 8, generator=draw).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        wanted, got = (
            attended(make(shared.position_ids, CPU), drawn, cotangent, None) for make in (SegmentPlan.of, varlen)
        )
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-2 * float(theirs.detach().abs().max()))
    assert [each.dtype for each in got] == [torch.bfloat16, *[torch.float32] * 3]


def step(model, setting, batch):
    """Return the log-probs of sampled tokens, and the gradient of their weighted sum."""
    logprobs = predict(model, setting, batch, batch.loss_mask)
    weights = torch.from_numpy(batch.advantages[batch.loss_mask])
    return logprobs.detach(), *torch.autograd.grad((logprobs[0] * weights).sum(), list(model.parameters()))


def loaded(path, **fields):
    made = load(TrainerSpec(model_path=path, device=Device.CPU, **fields))
    made.move_to(CPU)
    return made.model


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gpt2"])
def test_varlen_step_with_checkpointing_matches_bucket_attention(name, model_path, shared):
    """The layers of this Mistral model have attention windows of 5 tokens."""
    models = [loaded(model_path(name), gradient_checkpointing=each) for each in (False, True)]
    wanted, got = (
        step(model, PassSetting(CPU, plan_of), shared)
        for model, plan_of in zip(models, (SegmentPlan.of, varlen), strict=True)
    )
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * max(1, float(theirs.abs().max())))


def test_two_processes_that_share_a_micro_batch_match_one_process(model_path, shared):
    """The processes are threads with gloo between them; each gradient is summed over both."""
    model, store = loaded(model_path("qwen3")), dist.HashStore()

    def process(place):
        group = dist.ProcessGroup(store, place, 2)
        gloo = dist.ProcessGroupGloo(store, place, 2, timedelta(seconds=PATIENCE_S))
        group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
        return step(model, PassSetting(CPU, varlen, SequenceGroup(group, 2, place)), shared)

    logprobs, *wanted = step(model, PassSetting(CPU), shared)
    with ThreadPoolExecutor(2) as threads:
        (first, *ones), (second, *others) = threads.map(process, range(2), timeout=PATIENCE_S)
    for each in (first, second):
        torch.testing.assert_close(each, logprobs, rtol=0, atol=1e-5)
    for one, other, whole in zip(ones, others, wanted, strict=True):
        torch.testing.assert_close(one + other, whole, rtol=0, atol=1e-5 * max(1, float(whole.abs().max())))


@pytest.mark.parametrize("window", [None, 4])
def test_torch_varlen_kernel_accepts_forward_and_backward_calls(window, branching):
    """Torch's fake tensors compute nothing, so this tests only arguments, shapes and dtypes."""
    distinct = Distinct.of(branching)
    plan = VarlenPlan.of(branching.position_ids, CPU, distinct, kernel=torch_kernel())
    sizes = [(1, heads, len(distinct.kept), 8) for heads in (4, 2, 2)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        drawn = [torch.empty(size, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
        cotangent = torch.empty(1, len(distinct.kept), 4, 8, dtype=torch.bfloat16)
        out, *gradients = attended(plan, drawn, cotangent, window)
    assert (out.shape, out.dtype) == (cotangent.shape, torch.bfloat16)
    assert [each.shape for each in gradients] == [each.shape for each in drawn]


def test_layers_are_compiled_once_for_attention_plans_of_different_structure(
    model_path, micro_batch, shared, branching
):
    """torch 2.11 would compile the layers again for each different structure of a plan that is visible to it."""
    counter = CompileCounter()
    trunk = AutoModel.from_pretrained(model_path("qwen3"), attn_implementation=IMPLEMENTATION)
    AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(attend))
    for layer in trunk.layers:
        layer.compile(dynamic=True, backend=counter)
    counts = []
    for batch in (micro_batch((3, 9, 40)), shared, branching, micro_batch((8, 5))):
        distinct = Distinct.of(batch)
        token_ids = np.stack((batch.token_ids, batch.position_ids))[:, distinct.kept].astype(np.int64)
        with torch.no_grad():
            hidden_states(trunk, torch.from_numpy(token_ids), varlen(batch.position_ids, CPU, distinct))
        counts.append(counter.frame_count)
    assert counts[0] > 0 and set(counts) == {counts[0]}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4, 4, 64), (14, 2, 64), (16, 8, 128), (8, 1, 256), (4, 2, 80)])
def test_torch_varlen_kernel_matches_bucket_attention_on_a_gpu(shape):
    """Results in bf16 match within 5e-2 of the largest value; the trial has windows, shared prefixes and gradients."""
    heads = HeadShapes(*shape[:2], frozenset(shape[2:]))
    assert failed_trial(torch_kernel(), heads=heads, device=torch.device("cuda"), dtype=torch.bfloat16) is None
