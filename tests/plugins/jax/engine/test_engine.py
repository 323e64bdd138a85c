"""Tests of the JAX engine: equal results to the torch engine, compiled programs, and weight updates."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Final

import jax
import numpy as np
import pytest
import torch
from jax.sharding import SingleDeviceSharding
from transformers import AutoModelForCausalLM

from pipelinerl import rng
from pipelinerl.engines.batching.model_runner import Prefill, RowState, top_tokens
from pipelinerl.engines.torch import engine as torch_engine
from pipelinerl.enums import WeightFormat
from pipelinerl.errors import ModelError
from pipelinerl.models.decoder_config import read_config
from pipelinerl.plugins.bigram.engine import sample_rows
from pipelinerl.plugins.jax.decoder import load_weights
from pipelinerl.plugins.jax.engine import engine as jax_engine
from pipelinerl.plugins.jax.engine.program import PromptAttention
from pipelinerl.plugins.jax.engine.runner import JaxWeights, sample
from pipelinerl.plugins.warmstart.tiny_decoder import DecoderShape, char_tokenizer, random_decoder
from tests.fakes.engine_options import engine_options
from tests.fakes.jax_models import interpret
from tests.fakes.spoiled_token import refuses_alone
from tests.fakes.torch_rows import bytes_of
from tests.families import zoo
from trainer_contract.types import Device

#: The engine compiles its programs for two lengths: 128 and this one.
CONTEXT: Final = 160
SLOTS: Final = 8
COMPILED: Final[Counter[str]] = Counter()
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: COMPILED.update([event]))


def _programs():
    return COMPILED["/jax/core/compile/backend_compile_duration"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """A random model with larger weights than at initialisation, so that attention matters."""
    path = tmp_path_factory.mktemp("qwen3")
    tokenizer = char_tokenizer()
    shape = DecoderShape(
        hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, vocab=len(tokenizer), max_positions=CONTEXT
    )
    model = random_decoder(shape, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def options(model_path):
    return engine_options(model_path=model_path, slots=SLOTS, context_length=CONTEXT, device=Device.CPU)


@pytest.fixture(scope="module")
def runner(options):
    """A runner for the tests that do not change its weights; each test fills the rows that it uses."""
    return jax_engine.load_runner(options)


@pytest.fixture(scope="module")
def twin(options):
    return torch_engine.load_runner(replace(options, threads=1))


def _prompt(seed, length):
    return rng.generator(seed, "prompt").integers(0, len(char_tokenizer()), length).tolist()


def _state(row, prompt, *, temperature=1.0, top_k=0, top_p=1.0):
    return RowState(row, prompt[-1], len(prompt) - 1, 100 + row, temperature=temperature, top_k=top_k, top_p=top_p)


def _script(runner, *, top_k=5):
    """Run a fixed sequence of prefills, decodes, moves and copies of rows; return tokens and log-probs."""
    group, alone, single = _prompt(1, 9), _prompt(2, 30), _prompt(3, 1)
    runner.prefill([Prefill(group[:-1], [0, 1, 2]), Prefill(alone[:-1], [4])])
    runner.place([_state(0, group), _state(1, group, temperature=0.0), _state(2, group, temperature=0.6)])
    runner.place([_state(3, single), _state(4, alone, top_k=top_k, top_p=0.8 if top_k else 1.0)])
    steps = [runner.decode(5) for _ in range(6)]
    runner.move([4, 3], [0, 2])
    runner.copy_cache(1, [3, 4], len(group) - 1)
    runner.place([_state(3, group), _state(4, group, temperature=1.5)])
    long = _prompt(4, 120)
    runner.prefill([Prefill(long[:-1], [5])])
    runner.place([_state(5, long)])
    return steps + [runner.decode(6) for _ in range(20)]


def _agree(ours, theirs):
    assert [token_ids for token_ids, _ in ours] == [token_ids for token_ids, _ in theirs]
    for (_, logprobs), (_, expected) in zip(ours, theirs, strict=True):
        assert logprobs == pytest.approx(expected, abs=1e-4)


def test_jax_engine_samples_the_same_tokens_as_the_torch_engine(runner, twin):
    """The calls in `_script` cover both compiled lengths, greedy rows and truncated sampling."""
    _agree(_script(runner), _script(twin))


def test_jax_engine_samples_from_layers_with_windows_as_the_torch_engine(options, tmp_path):
    config = zoo.config_of("gemma3_text")
    config.vocab_size = len(char_tokenizer())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    zoo.randomise(model)
    model.save_pretrained(tmp_path)
    options = replace(options, model_path=tmp_path)
    _agree(_script(jax_engine.assembled(options)), _script(torch_engine.load_runner(replace(options, threads=1))))


def test_jax_engine_samples_the_same_tokens_if_steps_start_early(options, runner):
    """Each step that may start early does: before rows move, are copied, join, or leave."""
    early = jax_engine.assembled(options, starts_early=True)
    early.early_step.allowed = True
    _agree(_script(early, top_k=0), _script(runner, top_k=0))
    assert early.early_step.started


def test_jax_engine_updates_its_kv_cache_in_place(runner):
    """Prefill, decode, move and copy write into the memory of the cache, and none allocates a second cache."""
    lies = [slots.unsafe_buffer_pointer() for slots in runner._cache]
    _script(runner)
    assert [slots.unsafe_buffer_pointer() for slots in runner._cache] == lies


def test_jax_engine_prefills_many_prompts_of_different_lengths(runner, twin):
    """The prompts do not fit into one forward pass; the last one's answer ends with the context's last token."""
    lengths = (2, 128, 129, 140, 64, 5, 90, CONTEXT - 3)
    prompts = [_prompt(20 + row, length) for row, length in enumerate(lengths)]
    steps = []
    for each in (runner, twin):
        each.prefill([Prefill(prompt[:-1], [row]) for row, prompt in enumerate(prompts)])
        each.place([_state(row, prompt) for row, prompt in enumerate(prompts)])
        steps.append([each.decode(SLOTS) for _ in range(3)])
    _agree(*steps)


def test_jax_engine_compiles_nothing_after_the_start(runner, model_path):
    """No length, row count or update needs a new program. Rare ones, as for top-k, are compiled at first use."""
    random = rng.generator(0, "ragged")
    before = _programs()
    for _ in range(12):
        rows = int(random.integers(1, SLOTS + 1))
        prompts = [_prompt(row, int(random.integers(2, CONTEXT - 4))) for row in range(rows)]
        runner.prefill([Prefill(prompt[:-1], [row]) for row, prompt in enumerate(prompts)])
        runner.place([_state(row, prompt) for row, prompt in enumerate(prompts)])
        for _ in range(3):
            runner.decode(rows)
        runner.copy_cache(0, range(rows)[1:], len(prompts[0]) - 1)
        runner.move([rows - 1], [0 if rows > 1 else 1])
    runner.staging()[:] = bytes_of(AutoModelForCausalLM.from_pretrained(model_path))
    runner.finish_staging()
    runner.swap()
    runner.decode(1)
    assert _programs() == before


def test_jax_engine_divides_attention_heads_over_devices(options, twin):
    divided = jax_engine.assembled(replace(options, devices=2))
    prompt = _prompt(1, 9)
    steps = []
    for each in (divided, twin):
        each.prefill([Prefill(prompt[:-1], [0, 1])])
        each.place([_state(0, prompt), _state(1, prompt, temperature=0.0)])
        steps.append([each.decode(2) for _ in range(5)])
    _agree(*steps)


@pytest.mark.parametrize("vocab", [50, 2100])
def test_jax_sampler_agrees_with_the_numpy_sampler(vocab):
    random = rng.generator(vocab, "jax sampling")
    rows = 64
    logits = np.float32(random.standard_normal((rows, vocab)) * 3)
    noise = random.random(rows)
    noise[:2] = 0.0, 1.0 - 2**-53
    for truncates in (False, True):
        states = [
            RowState(
                row,
                0,
                0,
                0,
                temperature=(0.0, 1.0, 0.5, 2.5)[row % 4],
                top_k=(0, 4, 0, 9, 1)[row % 5] if truncates else 0,
                top_p=(1.0, 0.9, 0.3)[row % 3] if truncates else 1.0,
                min_p=(0.0, 0.2, 1.0, 0.01)[row % 7 % 4] if truncates else 0.0,
                policy_logprobs=row % 8 < 4,
                num_top=row % 4,
            )
            for row in range(rows)
        ]
        token_ids, logprobs, top_ids, top_logprobs = sample(
            jax.numpy.asarray(logits),
            temperature=np.array([state.temperature for state in states], np.float32),
            top_k=np.array([state.top_k for state in states], np.int32),
            top_p=np.array([state.top_p for state in states], np.float32),
            noise=noise,
            truncates=truncates,
            min_p=np.array([state.min_p for state in states], np.float32),
            policy_logprobs=np.array([state.policy_logprobs for state in states]),
            num_top=3,
        )
        top = {}
        expected = sample_rows(np.asarray(logits, np.float64), states, noise, top)
        assert token_ids.tolist() == expected[0]
        assert logprobs.tolist() == pytest.approx(expected[1], abs=2e-5)
        for row, pairs in top.items():
            largest = top_tokens(np.asarray(top_ids)[row], np.asarray(top_logprobs)[row], row % 4)
            assert [token_id for token_id, _ in largest] == [token_id for token_id, _ in pairs]
            assert [logprob for _, logprob in largest] == pytest.approx([logprob for _, logprob in pairs], abs=2e-5)
    assert not jax.config.read("jax_enable_x64")


def test_jax_sampler_returns_no_positive_logprobs_at_low_temperatures():
    """Divided by a temperature of 1e-5, logits exceed 1e5, where fp32 values are about 0.01 apart."""
    logits = rng.generator(1, "cold").standard_normal((64, 50)).astype(np.float32)
    logprobs = sample(
        jax.numpy.asarray(logits),
        temperature=np.full(64, 1e-5, np.float32),
        top_k=np.zeros(64, np.int32),
        top_p=np.ones(64, np.float32),
        noise=np.linspace(0.0, 0.99, 64),
        truncates=False,
    ).logprobs
    assert np.asarray(logprobs).tolist() == [0.0] * 64


@pytest.mark.parametrize("vocab", [50, 2100])
@pytest.mark.parametrize("wrong", [{0: np.nan}, {3: np.inf}, {"all": np.nan}, {"all": -np.inf}])
def test_row_with_nonfinite_logits_gets_a_nan_logprob_and_other_rows_are_sampled(vocab, wrong):
    random = rng.generator(vocab, "not finite")
    logits = np.float32(random.standard_normal((4, vocab)))
    spoiled = logits.copy()
    for at, value in wrong.items():
        spoiled[1:3, slice(None) if at == "all" else at] = value
    for truncates, of_policy in ((False, False), (True, False), (True, True)):
        options = {
            "policy_logprobs": np.full(4, of_policy),
            "temperature": np.array([1.0, 1.0, 0.0, 0.7], np.float32),
            "top_k": np.full(4, 5 * truncates, np.int32),
            "top_p": np.full(4, 0.9 if truncates else 1.0, np.float32),
            "noise": random.random(4),
            "truncates": truncates,
        }
        token_ids, logprobs = map(np.asarray, sample(jax.numpy.asarray(spoiled), **options)[:2])
        healthy = list(map(np.asarray, sample(jax.numpy.asarray(logits), **options)[:2]))
        assert np.isnan(logprobs[1:3]).all() and (token_ids[1:3] < vocab).all() and (token_ids[1:3] >= 0).all()
        assert token_ids[::3].tolist() == healthy[0][::3].tolist()
        assert logprobs[::3].tolist() == healthy[1][::3].tolist() and np.isfinite(logprobs[::3]).all()


# --- weights -------------------------------------------------------------------------------------------------------


def test_staged_bfloat16_weights_are_served_bit_for_bit(model_path):
    config, here = read_config(model_path), SingleDeviceSharding(jax.devices("cpu")[0])
    loaded = load_weights(model_path, config, place=lambda _: here, dtype=jax.numpy.bfloat16)
    weights = JaxWeights(config, loaded, place=lambda _: here)
    other = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    weights.staging()[:] = bytes_of(other)
    weights.finish_staging()
    weights.staging()[:] = 0  # the bytes of the next update arrive; the finished weights must not share this memory
    weights.swap()
    sent = dict(other.named_parameters())
    for entry in config.parameters:
        stacked = np.asarray(weights.current[entry.name]).astype(np.float32).reshape(-1, *entry.shape)
        for name, values in zip(entry.names, stacked, strict=True):
            assert np.array_equal(values, sent[name].detach().float().numpy()), name


@pytest.mark.parametrize("slots", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_prompt_with_nonfinite_logits_is_rejected_without_affecting_the_next_request(
    options, endless, tmp_path, slots
):
    """The NaN must not stay in the KV cache of the row that the next request uses, with one row or with several."""
    await refuses_alone(replace(options, slots=slots), tmp_path, jax_engine.load_runner, endless)


# --- platforms and refusals ----------------------------------------------------------------------------------------


def test_tpu_attention_kernel_agrees_with_plain_attention_in_the_interpreter(monkeypatch):
    interpret(monkeypatch)
    random = rng.generator(0, "attention")
    query, key, value = (
        jax.numpy.asarray(random.standard_normal((2, 256, heads, 16)), jax.numpy.float32) for heads in (2, 1, 1)
    )
    splash = PromptAttention.SPLASH.causal(query, key, value)
    assert np.allclose(splash, PromptAttention.PLAIN.causal(query, key, value), atol=2e-5)
    assert PromptAttention.on("tpu", devices=1) is PromptAttention.SPLASH
    assert PromptAttention.on("tpu", devices=2) is PromptAttention.PLAIN
    assert PromptAttention.on("cpu", devices=1) is PromptAttention.PLAIN


def test_jax_engine_rejects_unsupported_models_and_options(options, tmp_path):
    with pytest.raises(ModelError, match=f"at most the {CONTEXT} positions"):
        jax_engine.load_runner(replace(options, context_length=CONTEXT + 1))
    needed = 2 * 2 * SLOTS * CONTEXT * 2 * 8 * 4
    with pytest.raises(ModelError, match=f"need {needed} bytes of cache"):
        jax_engine.load_runner(options, cache_bytes=needed - 1)
    with pytest.raises(ModelError, match="devices is 64"):
        jax_engine.load_runner(replace(options, devices=64))
    with pytest.raises(ModelError, match="device is tpu"):
        jax_engine.load_runner(replace(options, device=Device.TPU))
    with pytest.raises(ModelError, match="native weights"):
        jax_engine.from_options(replace(options, weights=WeightFormat.INT8))
    with pytest.raises(ModelError, match=r"the torch engine runs its model on one device, got engine\.devices=2"):
        torch_engine.from_options(replace(options, devices=2))
    with pytest.raises(ModelError, match=r"the JAX engine has no options, got engine\.options zzz; remove them"):
        jax_engine.from_options(replace(options, options={"zzz": 1}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ModelError, match="'gpt2' is not supported"):
        jax_engine.load_runner(replace(options, model_path=tmp_path))
