"""`pipelinerl check` predicts memory use close to measurements, quickly for a 70B model, and advises what would fit."""

import json
import time
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from benchmarks.memory_prediction import MemoryCase, measured
from pipelinerl.config.recipe import load
from pipelinerl.models.model_shape import read_shape
from pipelinerl.plugins.memory.prediction import EngineMemory, MemoryPrediction, fits, lines, predict, trainable
from pipelinerl.plugins.memory.trainer_memory import TrainerMemory
from pipelinerl.roles.wiring import objective_of
from pipelinerl.trainers.torch.options import MomentDType, OptimizerOptions, StatePlace
from trainer_contract.types import Precision, WeightDType

GIB = 2**30
#: The config.json of Llama 3 70B.
LARGE = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def large(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    return tmp_path


@pytest.mark.parametrize(
    ("family", "precision", "rank", "optimizer"),
    [
        ("llama", Precision.FP32, 0, OptimizerOptions()),
        ("llama", Precision.BF16, 8, OptimizerOptions()),
        ("llama", Precision.BF16, 0, OptimizerOptions(place=StatePlace.HOST, moments=MomentDType.BF16)),
        pytest.param("llama", Precision.FP32, 0, OptimizerOptions(moments=MomentDType.BF16), marks=pytest.mark.slow),
        pytest.param("gpt2", Precision.FP32, 8, OptimizerOptions(), marks=pytest.mark.slow),
    ],
)
def test_memory_prediction_is_within_15_percent_of_measurement(family, precision, rank, optimizer, tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4}
    configs = {
        "llama": LlamaConfig(vocab_size=2048, num_key_value_heads=2, **sizes),
        "gpt2": GPT2Config(vocab_size=2048, n_embd=128, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0),
    }
    AutoModelForCausalLM.from_config(configs[family]).bfloat16().save_pretrained(tmp_path)
    options = {"precision": precision, "rank": rank, "checkpointing": rank == 0, "optimizer": optimizer}
    case = MemoryCase(name=family, path=tmp_path, tokens=512, **options)
    assert 0.85 <= measured(case, torch.device("cpu"))["ratio"] <= 1.15


def test_optimizer_state_is_counted_in_the_memory_of_the_device_or_host_that_holds_it(large):
    shape = read_shape(large)
    plain = TrainerMemory(shape=shape, precision=Precision.BF16, tokens=4096, trained=4096)
    assert replace(plain, moments=MomentDType.BF16).parts["moments"] == plain.parts["moments"] // 2
    host = replace(plain, place=StatePlace.HOST)
    assert "moments" not in host.parts and "moments" in plain.parts and plain.host == 0
    rounded = shape.count - shape.vocab * shape.hidden - (2 * shape.layers + 1) * shape.hidden
    assert host.host == 8 * shape.count + 4 * rounded
    assert plain.parts["weights"] - host.parts["weights"] == 2 * rounded and "casts" not in host.parts
    divided = replace(host, shards=8)
    assert divided.host == 8 * shape.count // 8, "masters are the shards, on the device"
    output = list(lines(MemoryPrediction(host, None, 0), limits={"trainer": GIB}))
    assert f"; {host.host / GIB:,.1f} GiB on the host" in output[0]
    single = replace(plain, checkpointing=True)
    advice = list(lines(MemoryPrediction(single, None, 0), limits={"trainer": single.total - 200 * GIB}))[1]
    assert "with trainer.options.optimizer.moments=bf16 (" in advice
    assert "with trainer.options.optimizer.place=host (" in advice


def test_memory_of_a_rounded_copy_of_the_weights_is_counted_if_the_trainer_computes_with_that_copy(large):
    shape = read_shape(large)
    plain = TrainerMemory(shape=shape, precision=Precision.BF16, tokens=4096, trained=4096)
    assert "served" not in plain.parts, "engines hold fp32"
    rounds = replace(plain, wire=WeightDType.BFLOAT16)
    assert rounds.parts["served"] == 2 * shape.count + 4 * (shape.count - shape.products)
    assert "casts" in plain.parts and "casts" not in rounds.parts
    assert "served" not in replace(rounds, rank=16).parts
    assert replace(rounds, shards=8).parts["served"] == 4 * shape.count // 8
    assert replace(rounds, place=StatePlace.HOST).parts["served"] == 6 * (shape.count - shape.products)


def test_memory_of_a_70b_model_is_predicted_from_its_config_in_less_than_2_seconds(large):
    began = time.process_time()
    shape = read_shape(large)
    assert time.process_time() - began < 2
    assert shape.count == 70_553_706_496
    whole = TrainerMemory(shape=shape, precision=Precision.BF16, tokens=8192, trained=8192, checkpointing=True)
    assert whole.parts["moments"] == 8 * shape.count and whole.total > 1000 * GIB
    lora = replace(whole, rank=16)
    assert 0.99 < lora.parts["weights"] / (2 * shape.count) < 1.02


def test_advice_for_a_process_that_does_not_fit_into_memory_makes_it_fit(large):
    shape = read_shape(large)
    trainer = TrainerMemory(shape=shape, precision=Precision.BF16, tokens=8192, trained=8192, rank=16)
    bf16 = WeightDType.BFLOAT16
    engine = EngineMemory(shape=shape, dtype=bf16, wire=bf16, slots=64, context=8192, devices=8)
    prediction = MemoryPrediction(trainer, engine, 1)
    limit = 170 * GIB
    output = list(lines(prediction, limits={"trainer": limit, "engine": limit}))
    advice = next(line for line in output if "more than" in line)
    assert advice.startswith("trainer: more than the 170.0 GiB that it has; it would fit with")
    assert "trainer.gradient_checkpointing=true" in advice
    assert replace(trainer, checkpointing=True).total <= limit < trainer.total
    assert not any(line.startswith("engine: more than") for line in output)
    assert not fits(prediction, limits={"trainer": limit}) and not fits(prediction, limits={"all": limit})
    assert fits(prediction, limits={"engine": limit}) and fits(prediction, limits={"all": 10 * limit})
    hopeless = list(lines(prediction, limits={"trainer": GIB}))
    assert any("no single knob is enough" in line for line in hopeless)


def test_engine_with_a_limit_keeps_a_reserve_of_it_from_keys_and_values(large):
    bf16 = WeightDType.BFLOAT16
    engine = EngineMemory(shape=read_shape(large), dtype=bf16, wire=bf16, slots=64, context=8192, devices=8)
    prediction, limit = MemoryPrediction(None, engine, 1), 50 * GIB
    assert "reserve" not in "".join(lines(prediction, limits={}))
    first, second = lines(prediction, limits={"engine": limit})
    assert ", reserve 2.5 GiB)" in first
    left = limit - 5 * GIB // 2 - (engine.total - engine.parts["keys and values"])
    assert second == f"engine: keys and values take what is left of 50.0 GiB, {left / GIB:,.1f} GiB"
    assert fits(prediction, limits={"engine": limit})
    assert not fits(prediction, limits={"engine": engine.least + GIB}), "the least limit includes a reserve"
    on_host = MemoryPrediction(None, replace(engine, staged_on_host=True), 1)
    assert "reserve" not in "".join(lines(on_host, limits={"engine": limit})), "vLLM reserves memory itself"


def test_memory_of_a_recipes_trainer_and_engine_is_predicted():
    config = load("tiny", ["trainer.options.lora.rank=8"])
    prediction = predict(config, objective_of(config))
    assert trainable(prediction) == "LoRA: 26.1 k of 190 k parameters train"
    assert [line.partition(":")[0] for line in lines(prediction, limits={})] == ["trainer", "engine"]
    assert any(line.startswith("all processes") for line in lines(prediction, limits={"all": 1}))
    whole = predict(load("tiny"), objective_of(load("tiny")))
    assert trainable(whole) is None and whole.trainer.total > prediction.trainer.total
    assert predict(load("tiny", ["trainer.type=jax"]), objective_of(config)).trainer is None


def test_each_part_of_the_memory_prediction_scales_with_the_option_that_affects_it(large):
    plain = TrainerMemory(shape=read_shape(large), precision=Precision.FP32, tokens=4096, trained=4096)
    assert replace(plain, tokens=8192).parts["activations"] > 1.9 * plain.parts["activations"]
    assert replace(plain, shards=8).parts["moments"] == plain.parts["moments"] // 8
    assert replace(plain, values=True).parts["moments"] == 2 * plain.parts["moments"]
    assert replace(plain, references=1).parts["weights"] == 2 * plain.parts["weights"]
    assert replace(plain, rank=16, references=1).parts["weights"] == replace(plain, rank=16).parts["weights"]


def test_memory_of_activations_is_divided_among_context_parallel_processes(large):
    plain = TrainerMemory(shape=read_shape(large), precision=Precision.BF16, tokens=32768, trained=32768, shards=8)
    shared = replace(plain, cp=8)
    assert shared.parts["activations"] == plain.parts["activations"] // 8
    assert shared.parts["weights"] == plain.parts["weights"], "divided alike"
    adapters = replace(plain, rank=16, shards=1)
    divided = replace(adapters, shards=8)
    assert divided.parts["weights"] < 0.2 * adapters.parts["weights"]
    assert replace(divided, references=1).parts["weights"] > 1.9 * divided.parts["weights"], "each has its own base"
    output = list(lines(MemoryPrediction(replace(adapters, checkpointing=True), None, 0), limits={"trainer": 80 * GIB}))
    assert "it would fit with trainer.options.mesh.cp=4 (" in next(line for line in output if "more than" in line)
