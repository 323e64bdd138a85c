"""Layers with their own cache shape, sinks, latents or states sample as transformers computes, whatever rows do.

Families of `tests.families.zoo` stand for the kinds of layers; the page of models lists the others.
"""

import asyncio
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from inference_contract.schemas import ChatCompletionRequest
from pipelinerl import rng
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.batching.model_runner import Prefill
from pipelinerl.engines.memory_budget import budget_of
from pipelinerl.engines.torch import forward
from pipelinerl.engines.torch.engine import load_runner
from pipelinerl.errors import ModelError
from pipelinerl.models.model_shape import read_shape
from tests.fakes.engine_options import engine_options
from tests.fakes.torch_rows import Row, bytes_of, decode, place, prefilled, start, swap
from tests.families import zoo
from trainer_contract.types import Device, Kernels, WeightDType

#: Families by what is special in them: sinks; sinks and other widths; shared keys of two widths and inputs per layer;
#: latents; a window that only the mask has; attention without its model's arguments; a single key head; chunks, and
#: queries that are scaled by position; indexers.
PAGED = ("gpt_oss", "mimo_v2_flash", "gemma4_text", "deepseek_v3", "phimoe", "nemotron", "gpt_bigcode", "llama4_text")
PAGED += ("deepseek_v32",)
#: Convolutions; both kinds in one layer; state spaces of both generations, with bounded time steps; no attention.
STATEFUL = ("lfm2", "falcon_h1", "jamba", "nemotron_h", "mamba2", "qwen3_5_text")
#: Largest difference of two log-probs. Rounding in fp32 changes the model with linear attention by as much.
WITHIN = {"qwen3_5_text": 2e-4}


def _within(name, device):
    return max(WITHIN.get(name, 2e-5), 2e-5 if device is Device.CPU else 1e-4)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("kinds")
    for name in (*PAGED, *STATEFUL):
        config = zoo.save(root / name, name) / "config.json"
        config.write_text(config.read_text().replace('"index_topk": 4', '"index_topk": 128'))
    return root


def _prompt(seed, length):
    return rng.generator(seed, "prompt").integers(12, zoo.VOCAB - 4, length).tolist()


def _load(path, **named):
    settings = {"slots": 12, "context_length": 128, "device": Device.CPU, "threads": 1, **named}
    return load_runner(engine_options(model_path=path, **settings))


def _reference(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def _join(runner, source, rows, at):
    """Start samples of the prompt of row `source` late."""
    runner.copy_cache(source, range(at, at + len(rows)), len(rows[0].prompt) - 1)
    place(runner, rows, at)


@torch.no_grad()
def _whole(model, row):
    logits = model(input_ids=torch.tensor([row.tokens]), use_cache=False).logits[0].log_softmax(-1)
    picked = logits[:-1].gather(1, torch.tensor(row.tokens[1:])[:, None])[:, 0]
    return picked[len(row.prompt) - 1 :].tolist()


@pytest.mark.parametrize("name", [*PAGED, *STATEFUL])
def test_rows_that_join_end_and_move_sample_as_transformers_computes(models, name, device):
    """Two prompts share a full block, two are equal, one is a single token, and samples of a prompt join late."""
    runner, common = _load(models / name, device=device), _prompt(0, 40)
    prompts = [_prompt(1, 9), common, [*common[:35], *_prompt(2, 3)], common, _prompt(3, 1), _prompt(4, 9)]
    rows = [Row(prompt, noise_key=key) for key, prompt in enumerate(prompts)]
    late = [Row(common, noise_key=10 + key) for key in range(3)]
    start(runner, rows[:4], 0)
    decode(runner, rows[:4], 3)
    _join(runner, 1, late[:1], 4)
    running = [*rows[:4], late[0]]
    decode(runner, running, 2)
    runner.release([1, 3])
    runner.move([4], [1])
    running = [rows[0], late[0], rows[2]]
    decode(runner, running, 2)
    _join(runner, 1, late[1:], 3)
    start(runner, rows[4:], 5)
    running += [*late[1:], *rows[4:]]
    decode(runner, running, 20)
    model = _reference(models / name)
    for row in (*rows, *late):
        assert row.logprobs == pytest.approx(_whole(model, row), abs=_within(name, device))


@torch.no_grad()
def _in_flight(old, new, row, count):
    """Return log-probs by transformers' cache: the old model fills it with all but the last `count` tokens fed."""
    tokens, cache = row.tokens, DynamicCache(config=old.config)
    begun = len(tokens) - 1 - count
    named = "cache_params" if old.config.model_type == "mamba2" else "past_key_values"
    if begun:
        old(input_ids=torch.tensor([tokens[:begun]]), use_cache=True, **{named: cache})
    found = []
    for at in range(begun, len(tokens) - 1):
        fed, position = torch.tensor([[tokens[at]]]), torch.tensor([[at]])
        logits = new(input_ids=fed, position_ids=position, use_cache=True, **{named: cache}).logits[0, -1]
        found.append(float(logits.log_softmax(-1)[tokens[at + 1]]))
    return found


@pytest.mark.parametrize("name", [*PAGED, *STATEFUL])
def test_update_in_flight_keeps_what_older_weights_cached_until_it_is_recomputed(models, name, device):
    runner, old, new = _load(models / name, device=device), _reference(models / name), _reference(models / name)
    forward._bound_time_steps(new)  # transformers bounds them only in a forward of all tokens
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(parameter, alpha=0.05)
    rows = [Row(_prompt(5, 9), noise_key=1), Row(_prompt(6, 38), noise_key=2), Row(_prompt(5, 9), noise_key=3)]
    start(runner, rows, 0)
    decode(runner, rows, 4)
    swap(runner, bytes_of(new))
    decode(runner, rows, 6)
    for row in rows:
        assert row.logprobs[4:] == pytest.approx(_in_flight(old, new, row, 6), abs=1e-4)
    start(
        runner, [*rows, Row(_prompt(5, 9), noise_key=4)], 0
    )  # as `recompute_kv` does, and a preempted row that resumes
    late = Row(_prompt(5, 9), noise_key=5)
    rows.append(late)
    _join(runner, 0, [late], 3)
    decode(runner, rows, 3)
    for row in rows:
        assert row.logprobs[-3:] == pytest.approx(_whole(new, row)[-3:], abs=_within(name, device))


@pytest.mark.parametrize(("name", "seed"), [("gpt_oss", 0), ("gemma4_text", 1), ("gpt_oss", 2), ("mimo_v2_flash", 3)])
def test_layers_with_a_window_keep_no_more_and_sample_as_transformers_computes(models, name, seed, monkeypatch):
    """Rows begin, continue earlier texts, join late, end, move, are preempted and resume, in any order."""
    monkeypatch.setattr("pipelinerl.engines.torch.page_cache.BLOCK", 4)
    runner, draw = _load(models / name, slots=6, context_length=96), rng.generator(seed, "rows")
    windows = runner._table.windows
    assert windows is not None and windows.num_slots < runner._table.num_blocks
    running = []
    ended = [Row(_prompt(9, 30))]
    for _ in range(30):
        action = draw.integers(6) if running else 0
        row, old = int(draw.integers(max(1, len(running)))), ended[int(draw.integers(len(ended)))]
        if action <= 1 and len(running) < 6:
            text = old.tokens[: int(draw.integers(1, 60))] if action else old.tokens[:60]
            text += _prompt(int(draw.integers(99)), int(draw.integers(1, 9)))
            running.append(Row(text, noise_key=len(ended)))
            start(runner, running[-1:], len(running) - 1)
        elif action == 2 and len(running) < 6 and len(running[row].prompt) > 1:
            running.append(Row(running[row].prompt, noise_key=50 + len(ended)))
            _join(runner, row, running[-1:], len(running) - 1)
        elif action == 3 or any(len(each.tokens) > 84 for each in running):
            ended.append(running.pop(row))
            runner.release([row])
            if row < len(running):
                runner.move([len(running)], [row])
                running.insert(row, running.pop())
        elif action == 4:
            runner.release([row])
            start(runner, [running[row]], row)
        else:
            decode(runner, running, int(draw.integers(1, 9)))
        needed = {block for each in windows._needed for block in each}
        assert all(len(each) <= runner._in_window for each in windows._needed)
        assert (windows.of_block[list(needed)] >= 0).all()
        assert (windows.of_block >= 0).sum() + len(windows._free) == windows.num_slots
        assert len(np.unique(windows.of_block)) == (windows.of_block >= 0).sum() + 1
    model = _reference(models / name)
    assert runner._table.reused_tokens > 0 and max(len(each.tokens) for each in (*ended, *running)) > 50
    for each in (*ended[1:], *running):
        assert each.logprobs == pytest.approx(_whole(model, each)[-len(each.logprobs) or 999 :], abs=2e-5)


def test_prompt_of_a_running_row_is_computed_once_even_if_the_row_has_gone_on_and_moved(models):
    runner, prompt = _load(models / "lfm2"), _prompt(0, 40)
    assert prefilled(runner, [Prefill(prompt, [0]), Prefill(_prompt(1, 40), [1]), Prefill(prompt, [2])]) == [(2, 40)]
    assert prefilled(runner, [Prefill(_prompt(2, 7), [3]), Prefill(_prompt(3, 40), [4])]) == [(1, 7), (1, 40)]
    place(runner, [Row([*prompt, 20])] * 5)
    runner.decode(5)
    runner.release([0, 1])
    runner.move([4, 3], [0, 1])
    assert prefilled(runner, [Prefill(prompt, [3])]) == []
    runner.release([2, 3])
    assert prefilled(runner, [Prefill(prompt, [2])]) == [(1, 40)]
    runner.swap()
    assert prefilled(runner, [Prefill(prompt, [3])]) == [(1, 40)]


@pytest.mark.parametrize("name", [*PAGED, *STATEFUL])
@pytest.mark.parametrize("dtype", [WeightDType.FLOAT32, WeightDType.BFLOAT16])
def test_predicted_cache_is_the_one_that_the_engine_allocates(models, name, dtype):
    runner, shape = _load(models / name, dtype=dtype, context_length=100), read_shape(models / name)
    predicted = budget_of(shape, dtype=dtype, wire=dtype, slots=12, context=100, received=0)
    assert predicted.cache + predicted.states == runner.cache_bytes > 0


def _chat_model(path, name, tokenizer):
    config = zoo.config_of(name)
    config.vocab_size = tokenizer.vocab_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    zoo.randomise(model)
    model.save_pretrained(path)
    return engine_options(model_path=path, slots=6, context_length=128, device=Device.CPU, threads=1)


@pytest.mark.parametrize("name", ["lfm2", "gpt_oss"])
async def test_engine_that_preempts_samples_of_states_or_windows_samples_the_same_tokens(tmp_path, endless, name):
    """Groups are larger than the six rows, so samples join late; a small cache preempts and resumes samples."""
    options = _chat_model(tmp_path, name, endless)
    requests = [
        ChatCompletionRequest(
            prompt_token_ids=[7 + seed] * 20, max_tokens=length, n=3, seed=seed, return_token_ids=True
        )
        for seed, length in enumerate((90, 60, 80, 8))
    ]

    async def answers(cache_bytes):
        load = partial(load_runner, options, cache_bytes=cache_bytes)
        engine = BatchingEngine(options, load=load, tokenizer=endless)
        await engine.start()
        done = await asyncio.gather(*map(engine.complete, requests))
        preemptions = engine.metrics().preemptions_total
        await engine.close()
        return [choice for answer in done for choice in answer.choices], preemptions

    runner = load_runner(options)
    small = 9 * runner._block_bytes + 8 * runner._slot_bytes
    (whole, none), (few, some) = await answers(None), await answers(small)
    assert none == 0 and some > 0
    for one, other in zip(whole, few, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.token_logprobs, other.token_logprobs, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "kernels", "sentence"),
    [
        ("doge", Kernels.FAST, "changes its attention mask, which this engine does not support; use another engine"),
        ("rwkv", Kernels.FAST, "has a cache of its own, which this engine does not support; use another engine"),
        ("xlstm", Kernels.FAST, "xLSTMForCausalLM has a cache of its own, which this engine does not support"),
        ("minimax", Kernels.FAST, "MiniMaxForCausalLM has a cache of its own, which this engine does not support"),
        ("deepseek_v4", Kernels.FAST, "has layers of type heavily_compressed_attention, which this engine does not"),
        (
            "deepseek_v32",
            Kernels.FAST,
            "attends to 4 selected tokens of a longer context.* set engine.context_length=4",
        ),
        ("llama4_text", Kernels.BATCH_INVARIANT, "batch_invariant has no attention in chunks, which this model has"),
        ("gpt_oss", Kernels.BATCH_INVARIANT, "batch_invariant has no attention sinks, which this model has; leave it"),
    ],
)
def test_layers_that_are_not_supported_are_named(tmp_path, name, kernels, sentence):
    with pytest.raises(ModelError, match=sentence):
        _load(zoo.save(tmp_path, name), kernels=kernels)
