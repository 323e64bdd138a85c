"""The dtypes of weights in the model directory, during transfer and in engines; contradictory dtypes are rejected."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelinerl.commands.check import findings
from pipelinerl.config.recipe import MODELS, load
from pipelinerl.errors import ModelError, RecipeError
from pipelinerl.models.checkpoint import check_directory, load_model, model_dtype, weight_files
from pipelinerl.roles.dtypes import dtypes_of, outlined, settled, with_directories, with_plain_models
from pipelinerl.roles.engine_rules import canary_of
from pipelinerl.training.canary_check import TOLERANCES
from trainer_contract.types import WeightDType

SHIPPED = MODELS / "tiny_speller"


def directory(path, dtype, *, config=None, keep=" "):
    """Write a copy of the shipped model with its weights in `dtype`; `config` is the dtype that its config.json names.

    Parameters whose names contain `keep` keep their dtype. With `config` None, config.json names no dtype.
    """
    shutil.copytree(SHIPPED, path)
    table = json.loads((path / "config.json").read_text())
    table.pop("dtype", None)
    (path / "config.json").write_text(json.dumps(table | ({"dtype": config} if config else {})))
    weights = load_file(SHIPPED / "model.safetensors")
    cast = {name: value if keep in name else value.to(dtype) for name, value in weights.items()}
    save_file(cast, path / "model.safetensors", metadata={"format": "pt"})
    return path


def recipe(path, *overrides):
    return load("tiny", [f"model.path={path}", *overrides])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_model_whose_config_has_no_dtype_gets_the_dtype_of_most_of_its_weight_bytes(tmp_path, dtype):
    path = directory(tmp_path / "model", dtype, keep="norm")
    assert model_dtype(path).value == str(dtype).removeprefix("torch.")
    loaded = load_model(path, dtype=model_dtype(path).value)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}, "norms in float32 become what it is, too"


def test_model_dtype_is_read_from_configs_in_old_and_nested_formats(tmp_path):
    path = directory(tmp_path / "model", torch.float32)
    for table in ({"torch_dtype": "bfloat16"}, {"text_config": {"dtype": "bfloat16"}}):
        (path / "config.json").write_text(json.dumps({"model_type": "x"} | table))
        assert model_dtype(path) is WeightDType.BFLOAT16
    (path / "config.json").write_text(json.dumps({"dtype": "float8_e4m3fn"}))
    with pytest.raises(ModelError, match="keeps its weights in float8_e4m3fn; expected float32, bfloat16, float16"):
        model_dtype(path)


def test_weight_files_of_a_model_are_those_named_in_its_index(tmp_path):
    path = directory(tmp_path / "model", torch.float32)
    (path / "consolidated.safetensors").write_text("the same weights once more, in their maker's format")
    assert weight_files(path) == [path / "model.safetensors"]
    (path / "model.safetensors").rename(path / "model-1.safetensors")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert weight_files(path) == [path / "model-1.safetensors"]
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(ModelError, match=r"lacks model-2\.safetensors, which its index names"):
        weight_files(path)


def test_pickled_weights_are_rejected(tmp_path):
    path = directory(tmp_path / "model", torch.float32)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only in pytorch_model\.bin, a pickle, which may run code and is not loaded"):
        check_directory(path)


def test_weights_are_sent_in_the_dtype_of_the_model_directory_unless_engines_compute_in_float32(tmp_path):
    path = directory(tmp_path / "model", torch.bfloat16, config="bfloat16")
    plain = dtypes_of(recipe(path))
    assert {plain.model, plain.wire, plain.engine} == {WeightDType.BFLOAT16}
    wide = recipe(path, "engine.dtype=float32")
    assert {dtypes_of(wide).wire, dtypes_of(wide).engine} == {WeightDType.FLOAT32}, "it sees every step"
    assert canary_of(wide).tolerance == TOLERANCES["float32"]
    kept = recipe(path, "engine.dtype=float32", "weights.dtype=bfloat16")
    assert (dtypes_of(kept).wire, dtypes_of(kept).engine) == (WeightDType.BFLOAT16, WeightDType.FLOAT32)
    assert canary_of(kept).tolerance == TOLERANCES["bfloat16"], "what travels is rounded"
    assert canary_of(recipe(path, "engine.weights=int8")).tolerance == TOLERANCES["int8"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["weights.dtype=float16"], "weights.dtype must not be float16 for the weights of .*, which are bfloat16"),
        (["trainer.type=bigram", "engine.dtype=float32"], "trainer.type 'bigram' gathers float32, got weights.dtype"),
        (["engine.type=bigram"], "engine.type 'bigram' computes in float32, got engine.dtype bfloat16"),
        (
            ["model.head_precision=fp32", "weights.dtype=float32"],
            "model.head_precision=fp32 needs the same head .* set weights.dtype=bfloat16 or engine.dtype=float32",
        ),
        (
            ["model.kernels=batch_invariant", "engine.dtype=float32", "trainer.precision=bf16"],
            "needs the same dtype .* engine.dtype float32; set weights.dtype=bfloat16 and engine.dtype=bfloat16",
        ),
    ],
)
def test_contradictory_dtypes_are_rejected(tmp_path, overrides, sentence):
    path = directory(tmp_path / "model", torch.bfloat16, config="bfloat16")
    with pytest.raises(RecipeError, match=sentence):
        dtypes_of(recipe(path, *overrides))


def in_fp8(path):
    """Write a copy of the shipped model whose linear layers are quantised in fp8 with one scale each."""
    directory(path, torch.bfloat16, config="bfloat16")
    stored = dict[str, torch.Tensor]()
    for name, values in load_file(path / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            stored[name] = (values.float() * 64).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = torch.tensor(1 / 64)
        else:
            stored[name] = values
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    table = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(table | {"quantization_config": {"quant_method": "fp8"}}))
    return path


def test_quantised_models_of_a_recipe_are_checked_by_stand_ins_and_run_from_copies(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = in_fp8(tmp_path / "model")
    config = recipe(source, f"reference.path={source}", "objective.grad2.kind=kl")
    with outlined(config) as (plain, needs, sources):
        stand = plain.model.resolved
        assert plain.reference.path == plain.model.path != config.model.path
        assert [need.part for need in needs] == ["disk"] and not needs[0].lacking
        assert f"{source} is quantised (fp8): the run first writes a copy in bf16" in needs[0].text
        assert next(findings(plain, sources)) == ("model", f"{source} with 57 tokens")
        assert with_directories(settled(plain), sources).model == config.model
    assert not stand.exists()
    ready = with_plain_models(config)
    assert "keeps its weights quantised (fp8): a copy in bf16" in capsys.readouterr().err
    assert ready.model.resolved.name == "model" and model_dtype(ready.model.resolved) is WeightDType.BFLOAT16
    assert load_model(ready.model.resolved).state_dict().keys() == load_model(SHIPPED).state_dict().keys()
    with outlined(config) as (plain, needs, _):
        assert plain == ready and not needs
