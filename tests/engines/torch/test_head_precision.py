"""Tests of the fp32 output layer of the engine: with and without transformers' modules, tied or not, after a swap."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipelinerl.config.recipe import MODELS
from pipelinerl.engines.torch.engine import load_runner
from pipelinerl.engines.torch.forward import ModuleForward
from tests.fakes.engine_options import engine_options
from tests.fakes.torch_rows import Row, start
from trainer_contract.types import Device, HeadPrecision, WeightDType

PROMPT = [7, 12, 9, 20, 31, 8, 44]
SIZES = {
    "vocab_size": 57,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(params=["qwen3", "llama"])
def model_path(request, tmp_path):
    """The shipped Qwen3 model with a tied output layer, or a random Llama with an untied one."""
    if request.param == "qwen3":
        return MODELS / "tiny_speller"
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SIZES, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


def runner(path, dtype, head, *, modules=False):
    of_model = {"model_path": path, "dtype": dtype, "head_precision": head}
    made = load_runner(engine_options(slots=2, context_length=32, device=Device.CPU, threads=1, **of_model))
    if modules:
        made._forward = ModuleForward(made._model)
    return made


def logits_after_prompt(engine):
    start(engine, [Row(PROMPT)])
    plan = engine._cache.plan_decode(engine._rows.positions[:1])
    with torch.inference_mode():
        return engine._forward.logits(torch.tensor([PROMPT[-1:]]), plan.positions, engine._cache, plan)[0]


@pytest.mark.parametrize("modules", [False, True])
def test_fp32_output_layer_does_not_round_logits_to_the_dtype_of_the_model(model_path, modules):
    rounded, exact = (
        logits_after_prompt(runner(model_path, WeightDType.BFLOAT16, head, modules=modules)) for head in HeadPrecision
    )
    assert rounded.dtype == torch.bfloat16 and exact.dtype == torch.float32
    assert not torch.equal(exact, exact.to(torch.bfloat16).float())
    torch.testing.assert_close(exact, rounded.float(), rtol=2e-2, atol=2e-2)


def test_weight_swap_updates_the_fp32_output_layer():
    engine = runner(MODELS / "tiny_speller", WeightDType.BFLOAT16, HeadPrecision.FP32)
    engine.staging().zero_()
    engine.finish_staging()
    before = logits_after_prompt(engine)
    engine.swap()
    assert before.abs().max() > 1.0
    assert logits_after_prompt(engine).abs().max() == 0.0
