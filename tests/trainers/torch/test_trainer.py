"""The torch trainer: the conformance kit on several architectures, a padded reference, and exactness."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from pipelinerl.objective.presets import resolve
from pipelinerl.trainers.torch.trainer import TorchTrainer
from tests.fakes.torch_trainers import gradients, padded_twin, spec_of, started
from trainer_contract.conformance import Status, run
from trainer_contract.conformance.probes import TrainerUnderTest
from trainer_contract.errors import NonFiniteError, ProtocolError, SpecError, StateError
from trainer_contract.host_weights import copied
from trainer_contract.types import Device, Head, Kernels, OptimizerSpec, Precision, Rounding, TrainerSpec

VOCAB = 48
NAMES = ("qwen2", "qwen3", "llama", "mistral", "gpt2", "qwen3_moe")
VALUE_HEADS = (("qwen2", Head.VALUE), ("gpt2", Head.VALUE))
#: Models on which the short form of the conformance kit runs, each for its special parts: query and key norms, a Conv1D
#: and learned positions, experts, a value head.
#: `test_packed_equals_padded_reference_for_each_architecture` checks that each architecture computes the right results.
IN_SHORT = (("qwen3", Head.POLICY), ("gpt2", Head.POLICY), ("qwen3_moe", Head.POLICY), ("qwen2", Head.VALUE))
OBJECTIVE = resolve("pipelinerl")


@pytest.mark.parametrize(
    ("name", "head"),
    [
        pytest.param(*each, marks=[] if each in IN_SHORT else pytest.mark.slow)
        for each in (*((name, Head.POLICY) for name in NAMES), *VALUE_HEADS)
    ],
)
def test_torch_trainer_passes_the_conformance_kit(name, head, model_path, tmp_path):
    results = run(TrainerUnderTest(TorchTrainer, spec_of(model_path(name), head=head), VOCAB), directory=tmp_path)
    assert [(r.name, r.reason) for r in results if r.status is not Status.PASSED] == []


@pytest.mark.parametrize("name", NAMES)
def test_packed_equals_padded_reference_for_each_architecture(name, model_path, micro_batch):
    path, batch = model_path(name), micro_batch()
    loss, logprobs, expected = padded_twin(path, batch)
    trainer = started(path)
    np.testing.assert_allclose(trainer.forward([batch])[0], logprobs, atol=2e-5)
    np.testing.assert_allclose(trainer.backward([batch], OBJECTIVE)[0].loss, loss, rtol=1e-4)
    got = gradients(trainer)
    assert got.keys() == expected.keys()
    for parameter, gradient in expected.items():
        torch.testing.assert_close(got[parameter], gradient, rtol=1e-3, atol=2e-5, msg=parameter)


@pytest.mark.parametrize("precision", Precision)
def test_warm_up_of_compiled_layers_changes_neither_gradients_nor_losses_nor_weights(
    precision, model_path, micro_batch
):
    trainers = [started(model_path("qwen2"), precision=precision) for _ in range(2)]
    trainers[0]._worker._warm_up()
    assert not trainers[0]._worker.has_gradient
    assert all(parameter.grad is None for parameter in trainers[0]._worker.model.parameters())
    losses = []
    for trainer in trainers:
        losses.append(trainer.backward([micro_batch()], OBJECTIVE)[0].loss)
        trainer.optimizer_step(learning_rate=1e-3)
    assert losses[0] == losses[1]
    warm, cold = (copied(trainer.gather_weights()) for trainer in trainers)
    assert all(np.array_equal(warm[name], cold[name]) for name in cold)


@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("precision", Precision)
def test_forward_and_backward_use_the_rounded_weights_that_engines_serve(
    model_path, micro_batch, tmp_path, precision, rounding
):
    """The fp32 master weights of a bf16 model are finer than the served weights."""
    AutoModelForCausalLM.from_pretrained(model_path("qwen2"), dtype=torch.bfloat16).save_pretrained(tmp_path)
    trainer, batch = started(tmp_path, precision=precision, rounding=rounding), micro_batch()
    before = trainer.forward([batch])[0].tobytes()
    for _ in range(3):
        trainer.backward([batch], OBJECTIVE)
        trainer.optimizer_step(learning_rate=1e-3)
    masters = {name: own.clone() for name, own in trainer._worker.own.items()}
    served = copied(trainer.gather_weights())
    assert any((masters[name] != masters[name].bfloat16()).any() for name in masters)
    (got,) = trainer.forward([batch])
    assert got.tobytes() != before
    assert got.tobytes() == trainer.forward_at([batch], served)[0].tobytes()
    (stats,) = trainer.backward([batch], OBJECTIVE)
    inside = batch.loss_mask
    np.testing.assert_array_equal(stats.predictions[inside], got[inside])
    for name, parameter in trainer._worker.loaded.weights.items():
        assert torch.equal(parameter, masters[name])
        assert parameter.grad is not None and parameter.grad.dtype is torch.float32


def test_torch_trainer_keeps_torch_from_building_a_cudnn_plan_for_each_new_segment_shape(model_path):
    torch.backends.cuda.enable_cudnn_sdp(True)
    started(model_path("qwen2"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_torch_trainer_in_bf16_is_close_to_fp32_and_keeps_fp32_weights(model_path, micro_batch):
    path, batch = model_path("qwen2"), micro_batch(tempered=False)
    exact = started(path).forward([batch])[0]
    trainer = started(path, precision=Precision.BF16)
    rough = trainer.forward([batch])[0]
    assert 0 < np.abs(rough - exact).max() < 0.5
    trainer.backward([batch], OBJECTIVE)
    trainer.optimizer_step(learning_rate=1e-3)
    assert {p.dtype for _, p in trainer._worker.loaded.weights.items()} == {torch.float32}


def test_gathered_torch_weights_have_the_dtype_of_the_model_directory(model_path, tmp_path, micro_batch):
    AutoModelForCausalLM.from_pretrained(model_path("qwen2"), dtype=torch.bfloat16).save_pretrained(tmp_path / "bf16")
    trainer = started(tmp_path / "bf16")
    assert {info.dtype for info in trainer.weight_layout()} == {"bfloat16"}
    assert {array.dtype for _, array in trainer.gather_weights()} == {torch.bfloat16}
    trainer.backward([micro_batch()], OBJECTIVE)
    trainer.optimizer_step(learning_rate=1e-6)
    (tmp_path / "state").mkdir()
    trainer.save_state(tmp_path / "state")
    restored = started(tmp_path / "bf16", restore_from=tmp_path / "state")
    assert restored.weight_layout() == trainer.weight_layout()
    for (_, ours), (_, theirs) in zip(
        restored._worker.loaded.weights.items(), trainer._worker.loaded.weights.items(), strict=True
    ):
        assert torch.equal(ours, theirs), "the masters keep what bf16 would round away"


@pytest.mark.parametrize("rounding", Rounding)
def test_only_dithered_rounding_sends_engines_updates_below_half_a_bf16_spacing(
    rounding, model_path, tmp_path, micro_batch
):
    AutoModelForCausalLM.from_pretrained(model_path("qwen2"), dtype=torch.bfloat16).save_pretrained(tmp_path / "bf16")
    trainer = started(tmp_path / "bf16", rounding=rounding)
    before = {name: weights.clone() for name, weights in trainer.gather_weights()}
    trainer.backward([micro_batch()], OBJECTIVE)
    stats = trainer.optimizer_step(learning_rate=1e-6)
    again, after = dict(trainer.gather_weights()), dict(trainer.gather_weights())
    assert all(torch.equal(again[name], after[name]) for name in after), "a retry sends the same bytes"
    moved = sum(int((after[name] != before[name]).sum()) for name in after)
    if rounding is Rounding.DITHERED:
        assert stats.sent_share == pytest.approx(1.0, abs=0.5)
        assert moved > 100
    else:
        assert stats.sent_share < 0.5


def test_gathered_weights_share_memory_with_the_model_and_contain_tied_weights_once(model_path):
    trainer = started(model_path("qwen2"))
    gathered = dict(trainer.gather_weights())
    assert "lm_head.weight" not in gathered and "model.embed_tokens.weight" in gathered
    for name, parameter in trainer._worker.loaded.weights.items():
        assert gathered[name].data_ptr() == parameter.data_ptr() and not gathered[name].requires_grad


def test_torch_trainer_rejects_states_of_other_models_and_incomplete_states(model_path, tmp_path, micro_batch):
    trainer = started(model_path("qwen2"))
    trainer.backward([micro_batch()], OBJECTIVE)
    trainer.optimizer_step(learning_rate=1e-2)
    trainer.save_state(tmp_path)
    with pytest.raises(StateError, match="of another model than model_path"):
        started(model_path("llama"), restore_from=tmp_path)
    record = json.loads((tmp_path / "trainer.json").read_text())
    (tmp_path / "trainer.json").write_text(json.dumps(record | {"format": 99}))
    with pytest.raises(StateError, match="has format 99, expected 1"):
        started(model_path("qwen2"), restore_from=tmp_path)
    (tmp_path / "trainer.json").write_text(json.dumps(record))
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(StateError, match="damaged"):
        started(model_path("qwen2"), restore_from=tmp_path)


def test_torch_trainer_clears_an_overflowing_gradient_and_keeps_its_weights(model_path, micro_batch):
    trainer = started(model_path("qwen2"))
    before = [weight.clone() for _, weight in trainer.gather_weights()]
    trainer.backward([micro_batch()], OBJECTIVE)
    next(trainer._worker.model.parameters()).grad[0, 0] = torch.inf
    with pytest.raises(NonFiniteError, match="cleared and the weights are unchanged"):
        trainer.optimizer_step(learning_rate=1e-2)
    assert trainer.model_version == 0
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, trainer.gather_weights(), strict=True))
    with pytest.raises(ProtocolError):
        trainer.optimizer_step(learning_rate=1e-2)


def test_weight_decay_applies_to_matrices_and_not_to_vectors(model_path, micro_batch):
    trainer = started(model_path("gpt2"), optimizer=OptimizerSpec(weight_decay=0.5))
    groups = trainer._worker.optimizer.param_groups
    assert {(group["weight_decay"], parameter.ndim) for group in groups for parameter in group["params"]} == {
        (0.5, 2),
        (0.0, 1),
    }


def test_torch_trainer_rejects_unsatisfiable_specs(model_path, tmp_path):
    with pytest.raises(SpecError, match=r"config\.json"):
        started(tmp_path)
    if not torch.cuda.is_available():
        with pytest.raises(SpecError, match="torch finds no CUDA device"):
            TorchTrainer().init_worker(TrainerSpec(model_path=model_path("qwen2"), device=Device.CUDA))
    partial = AutoModelForCausalLM.from_pretrained(model_path("qwen2"))
    del partial.model.layers[1].mlp.up_proj.weight
    partial.save_pretrained(tmp_path / "partial")
    with pytest.raises(SpecError, match=r"1 absent or of another shape, first model\.layers\.1\.mlp\.up_proj\.weight"):
        started(tmp_path / "partial")


def test_trainer_can_start_from_a_saved_value_model(model_path, micro_batch, tmp_path):
    critic, batch = started(model_path("qwen2"), head=Head.VALUE), micro_batch()
    assert not critic.forward([batch])[0].any(), "without a head of its own, values begin at 0"
    for _ in range(3):
        critic.backward([batch], OBJECTIVE)
        critic.optimizer_step(learning_rate=1e-2)
    critic.save_state(tmp_path)
    again = started(tmp_path / "model", head=Head.VALUE)
    assert again.forward([batch])[0].tobytes() == critic.forward([batch])[0].tobytes()
    assert again.model_version == 0
    names = [info.name for info in critic.weight_layout()]
    assert names[-2:] == ["value_head.weight", "value_head.bias"] and "lm_head.weight" not in names


def test_trainer_state_with_another_kind_or_width_of_head_is_rejected(model_path, micro_batch, tmp_path):
    started(model_path("qwen2"), head=Head.VALUE).save_state(tmp_path)
    with pytest.raises(StateError, match="has the head 'value', expected 'policy'"):
        started(model_path("qwen2"), restore_from=tmp_path)
    save_file({"weight": torch.zeros(1, 5), "bias": torch.zeros(1)}, tmp_path / "model" / "value_head.safetensors")
    with pytest.raises(SpecError, match=r"value_head\.safetensors does not fit the model in its directory"):
        started(tmp_path / "model", head=Head.VALUE)
    (tmp_path / "model" / "value_head.safetensors").unlink()
    with pytest.raises(StateError, match=r"lacks model/value_head\.safetensors"):
        started(model_path("qwen2"), head=Head.VALUE, restore_from=tmp_path)


@pytest.mark.parametrize("options", [{"lora": {"rank": 2}}, {"compile": True}])
def test_batch_invariant_kernels_are_rejected_together_with_lora_or_compiled_layers(model_path, options):
    with pytest.raises(SpecError, match=r"batch_invariant .* leave out options\.mesh, options\.lora and options"):
        started(model_path("llama"), kernels=Kernels.BATCH_INVARIANT, options=options)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_segment_gives_the_same_bits_alone_and_packed_with_batch_invariant_kernels(model_path, micro_batch, name):
    trainer, batch = started(model_path(name), kernels=Kernels.BATCH_INVARIANT), micro_batch()
    (packed,) = trainer.forward([batch])
    np.testing.assert_allclose(packed, started(model_path(name)).forward([batch])[0], rtol=0, atol=1e-5)
    first = int(np.flatnonzero(batch.position_ids == 0)[1])
    columns = {field.name: getattr(batch, field.name) for field in fields(batch)}
    cut = {name: column[:first] for name, column in columns.items() if isinstance(column, np.ndarray)}
    (alone,) = trainer.forward([replace(batch, **cut, num_segments=1)])
    assert alone.tobytes() == packed[:first].tobytes()
