"""Weights are written with the names, shapes and dtypes of the model directory that they came from."""

import json
import shutil
from typing import Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import load_model, weight_files
from pipelinerl.models.weight_writer import WeightWriter
from pipelinerl.plugins.jax.trainer.trainer import JaxTrainer
from pipelinerl.trainers.torch.trainer import TorchTrainer
from tests.families import zoo
from trainer_contract.types import Device, ParameterInfo, TrainerSpec

#: One family for each kind of conversion: buffers; experts stored one by one; other names; a missing prefix; transposed
#: and interleaved experts; names with a prefix of a model that sees; tied weights.
KINDS: Final = (
    "apertus", "glm4_moe", "mixtral", "gpt_neox", "gpt2", "gpt_oss", "llama4", "jamba", "nemotron_h", "llama_tied",
)  # fmt: skip
ALL: Final = [*KINDS, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted({*zoo.FAMILIES} - {*KINDS}))]


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")

    def made(name):
        return root / name if (root / name).exists() else zoo.save(root / name, name)

    return made


def stored(path):
    return {name: tensor for file in weight_files(path) for name, tensor in load_file(file).items()}


def written(model, target, *, dtype="float32", add=0.0):
    """Write a model with `add` added to each parameter, as a trainer that sends `dtype` would; return the directory."""
    named = dict(load_model(model).named_parameters())
    sent = {name: (each.detach() + add).to(getattr(torch, dtype)) for name, each in named.items()}
    target.mkdir()
    shutil.copyfile(model / "config.json", target / "config.json")
    writer = WeightWriter.of(model, [ParameterInfo(name, tuple(each.shape), dtype) for name, each in sent.items()])
    writer.write(target / "model.safetensors", iter(sent.items()))
    return target


def resaved(model, target, tensors):
    target.mkdir()
    shutil.copyfile(model / "config.json", target / "config.json")
    save_file(tensors, target / "model.safetensors")
    return target


def alike(ours, theirs):
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in theirs
    )


@pytest.mark.parametrize("name", ALL)
def test_weights_of_each_family_are_written_as_they_were_stored(name, family, tmp_path):
    model = family(name)
    assert alike(stored(written(model, tmp_path / "same")), stored(model))
    moved = written(model, tmp_path / "moved", add=0.25)
    assert {key: each.shape for key, each in stored(moved).items()} == {
        key: each.shape for key, each in stored(model).items()
    }
    before, after = load_model(model), load_model(moved)
    for key, each in after.named_parameters():
        assert torch.equal(each, dict(before.named_parameters())[key] + 0.25), key
    for key, each in after.named_buffers():
        assert torch.equal(each, dict(before.named_buffers())[key]), key


def test_tensors_in_other_dtypes_than_the_models_keep_theirs(family, tmp_path):
    tensors = stored(family("glm4_moe"))
    mixed = {
        name: each if name.endswith(("e_score_correction_bias", "norm.weight")) else each.bfloat16()
        for name, each in tensors.items()
    }
    model = resaved(family("glm4_moe"), tmp_path / "mixed", mixed)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    dtypes = {name: each.dtype for name, each in mixed.items()}
    new = stored(written(model, tmp_path / "new", dtype="bfloat16"))
    assert {name: each.dtype for name, each in new.items()} == dtypes
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    wide = stored(written(model, tmp_path / "wide", dtype="float32"))
    assert {each.dtype for each in wide.values()} == {torch.float32}, "the recipe's dtype replaces the model's"
    assert torch.equal(wide["lm_head.weight"], mixed["lm_head.weight"].float())


def test_tied_weights_that_are_stored_twice_are_both_written(family, tmp_path):
    tensors = stored(family("llama_tied"))
    twice = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    model = resaved(family("llama_tied"), tmp_path / "twice", twice)
    new = stored(written(model, tmp_path / "new", add=1.0))
    assert new.keys() == twice.keys()
    assert torch.equal(new["lm_head.weight"], tensors["model.embed_tokens.weight"] + 1.0)
    assert torch.equal(new["model.embed_tokens.weight"], new["lm_head.weight"])


def test_weights_that_are_stored_twice_with_different_values_stay_different(family, tmp_path):
    tensors = stored(family("llama_tied"))
    untied = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2}
    model = resaved(family("llama_tied"), tmp_path / "untied", untied)
    assert alike(stored(written(model, tmp_path / "new")), untied)


def test_tensors_that_transformers_does_not_load_are_copied(family, tmp_path):
    further = {
        "model.layers.3.eh_proj.weight": torch.randn(4, 8).bfloat16(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.arange(4),
        "model.mask": torch.tensor([True, False]),
        "model.empty": torch.empty(0, 3),
        "model.scale": torch.tensor(2.0).to(torch.float8_e4m3fn),
    }
    model = resaved(family("glm4_moe"), tmp_path / "more", stored(family("glm4_moe")) | further)
    new = stored(written(model, tmp_path / "new", add=1.0))
    assert alike({name: new[name].float() for name in further}, {name: each.float() for name, each in further.items()})
    assert all(new[name].dtype == each.dtype for name, each in further.items())


def test_experts_that_are_stored_in_one_tensor_stay_so(family, tmp_path):
    fused = dict(load_model(family("qwen3_moe")).named_parameters())
    assert "model.layers.0.mlp.experts.gate_up_proj" in fused
    model = resaved(family("qwen3_moe"), tmp_path / "fused", {name: each.detach() for name, each in fused.items()})
    assert alike(stored(written(model, tmp_path / "new")), stored(model))


def test_trunk_without_a_head_is_written_without_its_prefix(family, tmp_path):
    tensors = {name.removeprefix("transformer."): each for name, each in stored(family("gpt2")).items()}
    assert "h.0.ln_1.weight" in tensors
    model = resaved(family("gpt2"), tmp_path / "trunk", tensors)
    assert alike(stored(written(model, tmp_path / "new")), tensors)


def test_parameter_that_the_directory_cannot_hold_is_refused_before_training(family):
    with pytest.raises(ModelError, match=r"1 of the trainer's parameters .* first model\.own; save the model again"):
        WeightWriter.of(family("llama_tied"), [ParameterInfo("model.own", (3,), "float32")])


@pytest.mark.parametrize(
    ("trainer", "name"), [(TorchTrainer, "apertus"), (JaxTrainer, "llama_tied"), (JaxTrainer, "qwen3")]
)
def test_trainers_weights_are_written_as_they_were_stored(trainer, name, family, tmp_path):
    model, worker = family(name), trainer()
    worker.init_worker(TrainerSpec(model_path=model, device=Device.CPU))
    writer = WeightWriter.of(model, worker.weight_layout())
    writer.write(tmp_path / "new.safetensors", worker.gather_weights())
    worker.close()
    assert alike(load_file(tmp_path / "new.safetensors"), stored(model))
