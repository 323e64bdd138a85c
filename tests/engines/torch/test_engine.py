"""The torch engine as a whole: settings, samples that are preempted, and logits that are not finite."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from inference_contract.errors import NotFinite
from inference_contract.schemas import ChatCompletion, ChatCompletionRequest
from inference_contract.weights import OnUpdate
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.torch.engine import from_options, load_runner
from pipelinerl.enums import WeightFormat
from pipelinerl.errors import ModelError
from pipelinerl.plugins.warmstart.tiny_decoder import DecoderShape, char_tokenizer, random_decoder
from tests.fakes.engine_options import engine_options
from tests.fakes.spoiled_token import refuses_alone
from tests.fakes.torch_rows import bytes_of
from trainer_contract.types import Device, Kernels, WeightDType

CONTEXT = 128


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen2")
    tokenizer = char_tokenizer()
    shape = DecoderShape(
        hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, vocab=len(tokenizer), max_positions=CONTEXT
    )
    random_decoder(shape, seed=1).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def options(model_path):
    return engine_options(model_path=model_path, slots=8, context_length=CONTEXT, device=Device.CPU, threads=1)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("slots", [1, 2])
async def test_prompt_with_nonfinite_logits_is_rejected_without_affecting_the_next_request(
    options, endless, tmp_path, slots, early
):
    """The NaN must not stay in the KV cache of the row that the next request uses, with one row or with several."""
    await refuses_alone(replace(options, slots=slots), tmp_path, partial(load_runner, starts_early=early), endless)


@pytest.mark.parametrize("early", [False, True])
async def test_engine_with_nonfinite_weights_recovers_with_the_next_update(options, endless, early):
    """While the weights are NaN, the KV cache of every row is corrupted; the next update must repair it."""
    few = replace(options, slots=2)
    engine = BatchingEngine(few, load=lambda: load_runner(few, starts_early=early), tokenizer=endless)
    await engine.start()
    requests = [ChatCompletionRequest(prompt_token_ids=[7, token], max_tokens=6, seed=1) for token in (8, 9, 10, 11)]
    for version, factor, answered in ((1, torch.nan, NotFinite), (2, 1.0, ChatCompletion)):
        model = AutoModelForCausalLM.from_pretrained(options.model_path)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        engine.staging()[:] = bytes_of(model)
        await asyncio.to_thread(engine.finish_staging)
        await engine.commit(version=version, epoch=0, on_update=OnUpdate.CONTINUE)
        answers = await asyncio.gather(*map(engine.complete, requests), return_exceptions=True)
        assert [type(answer) for answer in answers] == [answered] * 4
    await engine.close()


def test_kv_cache_holds_at_least_one_sequence_and_at_most_its_budget(options):
    whole = load_runner(options).cache_bytes
    assert whole == 2 * 2 * 8 * 2 * CONTEXT * 8 * 4
    one = whole // options.slots
    assert load_runner(options, cache_bytes=whole // 2 + 1).cache_bytes == whole // 2
    assert load_runner(options, cache_bytes=one).cache_bytes == one
    with pytest.raises(ModelError, match=f"a sequence of {CONTEXT} tokens needs {one} bytes of cache"):
        load_runner(options, cache_bytes=one - 1)


def test_gpu_memory_share_has_no_effect_on_cpu(options):
    """The launcher sets a share for each visible GPU; torch without CUDA ignores it."""
    load_runner(replace(options, device=Device.CPU, memory_share=1e-9))


@pytest.mark.gpu
def test_kv_cache_that_exceeds_the_gpu_memory_share_is_rejected(options):
    """The last line of the test restores the process's memory limit for other tests."""
    on_gpu = replace(options, device=Device.CUDA)
    load_runner(replace(on_gpu, memory_share=0.5))
    with pytest.raises(ModelError, match=r"MiB are left of the device's .*; set engine\.slots to \d+ or less"):
        load_runner(replace(on_gpu, memory_share=0.5, slots=2**24))
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_context_length_that_exceeds_that_of_the_model_is_rejected(options):
    with pytest.raises(ModelError, match=f"at most the {CONTEXT} positions"):
        load_runner(replace(options, context_length=CONTEXT + 1))


def test_batch_invariant_kernels_are_rejected_if_engine_and_trainer_would_round_differently(options, tmp_path):
    invariant = replace(options, kernels=Kernels.BATCH_INVARIANT)
    with pytest.raises(ModelError, match="batch-invariant kernels serves native weights only"):
        from_options(replace(invariant, weights=WeightFormat.INT8))
    shape = GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=CONTEXT)
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel rounds otherwise than its trainer, .*engine\.dtype=float32"):
        load_runner(replace(invariant, model_path=tmp_path, dtype=WeightDType.BFLOAT16))
