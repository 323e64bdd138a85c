"""Padded rows, compared with packed rows of the same model in value and gradient."""

from functools import partial

import pytest
import torch

from pipelinerl.models.checkpoint import load_model, replace_attention
from pipelinerl.trainers.torch.packed.attention import IMPLEMENTATION
from pipelinerl.trainers.torch.packed.attention_choice import SegmentAttention
from pipelinerl.trainers.torch.packed.planner import planning
from pipelinerl.trainers.torch.packed.segments import PaddedPlan
from pipelinerl.trainers.torch.packed_model import PackedModel
from pipelinerl.trainers.torch.passes import PassSetting, predict
from tests.fakes.torch_trainers import started
from tests.families import zoo
from trainer_contract.conformance.probes import LINEAR
from trainer_contract.errors import SpecError
from trainer_contract.types import Head, Kernels, Precision

CPU = torch.device("cpu")


def step(path, plan_of, batch, *, packs):
    """Return log-probs and the gradient of their weighted sum, and the number of calls of the first layer."""
    model, calls = load_model(path), []
    if packs:
        replace_attention(model, IMPLEMENTATION)
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    logprobs = predict(PackedModel(model), PassSetting(CPU, plan_of), batch, batch.loss_mask)
    weights = torch.from_numpy(batch.advantages[batch.loss_mask])
    gradients = torch.autograd.grad((logprobs[0] * weights).sum(), list(model.parameters()))
    return [logprobs.detach(), *gradients], len(calls)


@pytest.mark.parametrize("further", [0, 2])
@pytest.mark.parametrize("name", ["shared", "branching"])
def test_padded_rows_match_packed_rows_however_many_passes_other_processes_need(name, further, model_path, request):
    batch, path = request.getfixturevalue(name), model_path("qwen3")
    wanted, _ = step(path, PassSetting(CPU).plan_of, batch, packs=True)
    plan_of = partial(PaddedPlan.of, agree=lambda buckets: buckets + further)
    got, calls = step(path, plan_of, batch, packs=False)
    assert calls == len(PaddedPlan.of(batch.position_ids, CPU).layout.buckets) + further
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * max(1, float(theirs.abs().max())))


@pytest.mark.parametrize(
    ("requested", "kernels", "cp", "sentence"),
    [
        ("varlen", Kernels.FAST, 1, r'options\.attention = "varlen" is for packed rows; the model trains padded'),
        ("auto", Kernels.BATCH_INVARIANT, 1, r"model\.kernels = batch_invariant is for packed rows"),
        ("auto", Kernels.FAST, 2, r"options\.mesh\.cp divides packed rows; the model trains padded, so leave it out"),
    ],
)
def test_what_only_packed_rows_can_do_is_rejected_for_padded_rows(requested, kernels, cp, sentence):
    with pytest.raises(SpecError, match=sentence):
        planning(SegmentAttention(requested), Precision.FP32, CPU, {}, kernels, packs=False, cp=cp)


def test_critic_of_a_recurrent_model_trains_with_recomputed_layers(tmp_path, micro_batch):
    """Its values are 0 at first, so its gradient reaches the head alone until the first step."""
    path, batch, values = zoo.save(tmp_path / "lfm2", "lfm2"), micro_batch(), []
    trainers = [started(path, head=Head.VALUE, gradient_checkpointing=recomputes) for recomputes in (False, True)]
    for trainer in trainers:
        for _ in range(2):
            trainer.backward([batch], LINEAR)
            trainer.optimizer_step(learning_rate=1e-2)
        values.append(torch.from_numpy(trainer.forward([batch])[0]))
    assert not trainers[0]._worker.loaded.model.packs and values[0].abs().max() > 0
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-6)
