"""Decoding with drafts samples the tokens, log-probs and versions that decoding one token at a time samples."""

import asyncio
from collections import Counter
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from inference_contract.schemas import ChatCompletionRequest
from inference_contract.weights import OnUpdate
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.batching.model_runner import Prefill, RowState
from pipelinerl.engines.torch.engine import load_runner, refuse_different
from pipelinerl.engines.torch.speculation import Drafter, Drafts, continuation, length_of
from pipelinerl.errors import ModelError, RecipeError
from tests.fakes.eager_graphs import use_eager_graphs
from tests.fakes.engine_options import engine_options
from tests.fakes.gated_runner import GatedRunner
from tests.fakes.torch_rows import bytes_of
from tests.families import zoo
from trainer_contract.types import Device, Kernels

CONTEXT = 160
#: A family of the engine's own forward, one with windows of nearly a block, one with latents, and one with experts.
FAMILIES = {"llama": {}, "gemma3_text": {"sliding_window": 30}, "deepseek_v3": {}, "qwen3_moe": {}}
#: A text that repeats itself, of two and a half blocks of the cache.
PROMPT = [*range(20, 40)] * 4
REQUESTS = (
    {"temperature": 0.0},
    {"temperature": 0.3, "n": 3},
    {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.3, "frequency_penalty": 0.3, "presence_penalty": -0.2, "logit_bias": {"22": 1.5}},
    {"temperature": 0.2, "stop": ["ab", "!"]},
    {"temperature": 0.3, "max_tokens": 17, "prompt_token_ids": [33]},
)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Random models whose answers repeat, because layers change little of what an embedding says."""
    root = tmp_path_factory.mktemp("speculation")
    for name, settings in FAMILIES.items():
        model = AutoModelForCausalLM.from_pretrained(zoo.save(root / name, name), **settings)
        with torch.no_grad():
            for part, parameter in model.named_parameters():
                if parameter.ndim > 1 and "embed" not in part and "lm_head" not in part:
                    parameter.mul_(0.4)
        model.save_pretrained(root / name)
    return root


def _load(path, drafted=4, **named):
    settings = {"slots": 6, "context_length": CONTEXT, "device": Device.CPU, "threads": 1, **named}
    how = {name: settings.pop(name) for name in ("cache_bytes", "starts_early") if name in settings}
    return load_runner(engine_options(model_path=path, options={"speculate": drafted}, **settings), **how)


async def _answers(path, endless, drafted, *, requests=REQUESTS, on_update=None, **named):
    """Return the choices of all requests and the metrics; `on_update` commits the same weights meanwhile."""
    options = engine_options(model_path=path, slots=6, context_length=CONTEXT)
    engine = BatchingEngine(options, load=partial(_load, path, drafted, **named), tokenizer=endless)
    await engine.start()
    given = {"prompt_token_ids": PROMPT, "max_tokens": 60, "return_token_ids": True}
    chats = [ChatCompletionRequest(**{**given, "seed": place, **each}) for place, each in enumerate(requests)]
    tasks = [asyncio.create_task(engine.complete(chat)) for chat in chats]
    if on_update is not None:
        while engine.metrics().generated_tokens_total < 60:
            await asyncio.sleep(0.001)
        engine.staging()[:] = bytes_of(AutoModelForCausalLM.from_pretrained(path))
        await engine.commit(version=1, epoch=1, on_update=on_update)
    done, metrics = await asyncio.gather(*tasks), engine.metrics()
    await engine.close()
    return [choice for answer in done for choice in answer.choices], metrics


def _same(one, other):
    assert [choice.token_ids for choice in one] == [choice.token_ids for choice in other]
    assert [choice.finish_reason for choice in one] == [choice.finish_reason for choice in other]
    assert [choice.message for choice in one] == [choice.message for choice in other]
    for a, b in zip(one, other, strict=True):
        assert a.token_logprobs == pytest.approx(b.token_logprobs, abs=2e-5)
        for found, expected in zip(*(each.logprobs.content if each.logprobs else [] for each in (a, b)), strict=True):
            assert [top.token for top in found.top_logprobs] == [top.token for top in expected.top_logprobs]


@pytest.mark.parametrize("name", FAMILIES)
async def test_requests_of_every_kind_get_the_tokens_of_plain_decoding(models, endless, name, device):
    plain, one_by_one = await _answers(models / name, endless, 0, device=device)
    drafted, metrics = await _answers(models / name, endless, 4, device=device)
    _same(plain, drafted)
    assert metrics.generated_tokens_total == one_by_one.generated_tokens_total
    assert metrics.decode_steps_total < 0.85 * one_by_one.decode_steps_total


@pytest.mark.parametrize(
    ("drafts", "early"), [(4, False), (0, False), (0, True)], ids=["drafts", "one by one", "steps start early"]
)
@pytest.mark.parametrize("on_update", OnUpdate)
async def test_updates_and_preemption_leave_tokens_and_their_versions_as_they_are(
    models, endless, on_update, drafts, early, device
):
    """The cache holds two full contexts, so samples are preempted, and an update arrives in the middle."""
    plain, _ = await _answers(models / "llama", endless, 0, device=device)
    how = {"cache_bytes": _load(models / "llama").cache_bytes // 3, "starts_early": early, "device": device}
    drafted, metrics = await _answers(models / "llama", endless, drafts, on_update=on_update, **how)
    assert metrics.cache_used_share == 0.0
    assert metrics.preemptions_total > 0 or on_update is OnUpdate.ABORT  # which may empty the cache before
    for one, other in zip(plain, drafted, strict=True):
        count = len(other.token_ids)
        assert one.token_ids[:count] == other.token_ids
        assert one.token_logprobs[:count] == pytest.approx(other.token_logprobs, abs=2e-5)
        assert sum(tokens for _, tokens in other.version_spans) == count
        assert on_update is OnUpdate.ABORT or count == len(one.token_ids)
    assert {version for each in drafted for version, _ in each.version_spans} == {0, 1}


async def test_new_weights_sample_every_token_after_their_version_and_none_before(models, endless):
    """The new weights write another text, which their spans must cover exactly; the cache is recomputed."""
    path = models / "llama"
    gate = GatedRunner(_load(path))
    engine = BatchingEngine(engine_options(model_path=path), load=lambda: gate, tokenizer=endless)
    await engine.start()
    chat = ChatCompletionRequest(prompt_token_ids=PROMPT, temperature=0.0, max_tokens=80, return_token_ids=True)
    task = asyncio.create_task(engine.complete(chat))
    await asyncio.to_thread(gate.allow, 25)
    old, new = (AutoModelForCausalLM.from_pretrained(path) for _ in range(2))
    with torch.no_grad():
        new.lm_head.weight.copy_(new.lm_head.weight.roll(1, dims=0))
    engine.staging()[:] = bytes_of(new)
    commit = asyncio.create_task(engine.commit(version=3, epoch=1, on_update=OnUpdate.RECOMPUTE_KV))
    await asyncio.sleep(0)
    gate.open()
    await commit
    choice = (await task).choices[0]
    await engine.close()
    (first, before), (second, after) = choice.version_spans
    assert (first, second, before + after) == (0, 3, 80) and before > 30, "drafts were accepted before the update"
    with torch.no_grad():
        by = [model(torch.tensor([PROMPT + choice.token_ids])).logits[0, len(PROMPT) - 1 : -1] for model in (old, new)]
    assert torch.cat((by[0][:before], by[1][before:])).argmax(-1).tolist() == choice.token_ids


async def test_stream_has_a_chunk_for_each_accepted_token_and_ends_at_a_stop_string(models, tokenizer):
    path = models / "llama"
    found = []
    for drafted in (0, 4):
        load = partial(_load, path, drafted)
        engine = BatchingEngine(engine_options(model_path=path), load=load, tokenizer=tokenizer)
        await engine.start()
        chat = ChatCompletionRequest(
            prompt_token_ids=PROMPT, temperature=0.3, seed=4, max_tokens=40, stream=True, return_token_ids=True
        )
        chunks = [each async for each in engine.stream(chat)]
        await engine.close()
        found.append([(choice.delta.content, choice.token_ids) for chunk in chunks for choice in chunk.choices])
    assert found[0] == found[1] and all(len(token_ids or [0]) == 1 for _, token_ids in found[1])


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_log_probs_are_equal_to_the_bit_with_batch_invariant_kernels(tmp_path, temperature):
    _save_llama(tmp_path, vocab_size=64, hidden_size=32, intermediate_size=64)
    results, prompt = [], PROMPT[:30]
    for drafted in (0, 4):
        runner = _load(tmp_path, drafted, kernels=Kernels.BATCH_INVARIANT)
        runner.prefill([Prefill(prompt[:-1], [0])])
        runner.place([RowState(0, prompt[-1], len(prompt) - 1, 0, temperature=temperature, top_p=1.0, top_k=0)])
        results.append(_decode(runner, 1, 80))
    assert results[0][0] == results[1][0]


def _save_llama(path, **sizes):
    torch.manual_seed(1)
    given = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": CONTEXT, **sizes}
    model = LlamaForCausalLM(LlamaConfig(**given)).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(60)
    model.save_pretrained(path)
    return model


def _decode(runner, rows, count):
    """Return the first `count` pairs of token and log-prob of each row, by row."""
    found = [[] for _ in range(rows)]
    while min(map(len, found)) < count:
        for row, first in enumerate(zip(*runner.decode(rows), strict=True)):
            found[row] += [first, *(each[:2] for each in runner.further.get(row, ()))]
    return [each[:count] for each in found]


def test_sampled_tokens_have_the_distribution_of_the_model(tmp_path):
    """Chi-square of 4,096 pairs of tokens against the probabilities that transformers computes. The prompt has the
    drafted token twice, so that about as many drafts are rejected as accepted.
    """
    model = _save_llama(tmp_path, vocab_size=6, hidden_size=16, intermediate_size=16)
    prompt, rows = [2, 3, 1, 4, 2, 5, 2, 3, 1, 4], 128
    runner = _load(tmp_path, slots=rows, context_length=64)
    counts = Counter()
    for batch in range(32):
        runner.prefill([Prefill(prompt[:-1], range(rows))])
        keys = np.arange(rows) + rows * batch
        given = {"temperature": 1.0, "top_p": 1.0, "top_k": 5}
        runner.place([RowState(row, prompt[-1], len(prompt) - 1, int(key), **given) for row, key in enumerate(keys)])
        counts.update(tuple(token for token, _ in pair) for pair in _decode(runner, rows, 2))
        runner.release(range(rows))
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, token] for token in range(6)])).logits[:, len(prompt) - 1 :].double()
    kept = logits.where(logits >= logits.topk(5).values[..., -1:], -torch.inf).softmax(-1)
    expected = (kept[0, 0][:, None] * kept[:, 1]).flatten().numpy()
    seen = np.array([counts[one, other] for one in range(6) for other in range(6)])
    assert not seen[expected == 0].any()
    likely = expected * seen.sum() >= 5
    bins = [np.append(each[likely], each[~likely].sum()) for each in (seen, expected * seen.sum())]
    assert chisquare(*bins).pvalue > 0.01


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_drafts_run_in_cuda_graphs(tmp_path, monkeypatch):
    _save_llama(tmp_path, vocab_size=16, hidden_size=16, intermediate_size=16)
    results, prompt = [], [5, 6, 7] * 3
    for drafted in (0, 2):
        runner = _load(tmp_path, drafted, slots=2, context_length=32)
        if drafted:
            use_eager_graphs(runner, monkeypatch)
        runner.prefill([Prefill(prompt[:-1], [0, 1])])
        states = {"temperature": 0.5, "top_p": 1.0, "top_k": 0}
        runner.place([RowState(row, prompt[-1], len(prompt) - 1, row, **states) for row in range(2)])
        results.append([[token for token, _ in row] for row in _decode(runner, 2, 8)])
    assert results[0] == results[1]


def test_models_with_recurrent_states_are_rejected(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(zoo.save(tmp_path, "lfm2"))
    assert refuse_different(model)
    with pytest.raises(ModelError, match="Lfm2ForCausalLM has recurrent states, which cannot return to the token"):
        refuse_different(model, options={"speculate": 2})


@pytest.mark.parametrize("options", [{"speculate": 17}, {"speculate": True}, {"speculate": -1}, {"speculative": 4}])
def test_invalid_options_are_rejected(options):
    with pytest.raises(RecipeError, match=r"engine\.options\.speculat"):
        length_of(options)


@pytest.mark.parametrize(
    ("tokens", "shortest", "draft"),
    [
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], 2, [8, 1, 2]),  # the latest occurrence
        ([4, 1, 2, 3, 9, 1, 2, 8, 4, 1, 2], 2, [3, 9, 1]),  # a longer one before a later one
        ([7, 7, 7], 2, [7, 7, 7]),  # the text ends within the draft
        ([1, 2, 3, 1, 2], 3, []),
        ([1, 2, 3, 4, 2], 2, []),
        ([5], 1, []),
    ],
)
def test_draft_continues_an_earlier_occurrence_of_the_last_tokens(tokens, shortest, draft):
    assert continuation(np.array(tokens, np.int32), 3, shortest=shortest).tolist() == draft


def test_drafts_grow_while_they_are_accepted_and_stay_within_the_context():
    drafter, tokens = Drafter(1, 4), np.full((1, 12), 7, np.int32)
    lengths = []
    for position, holds in ((3, True), (4, True), (5, True), (6, False), (7, False), (10, True), (11, True)):
        drafts = drafter.drafts(tokens, np.array([position]))
        lengths.append(0 if drafts is None else int(drafts.lengths[0]))
        if drafts is not None:
            drafter.learn(drafts, drafts.lengths * holds)
    assert lengths == [1, 2, 4, 4, 2, 1, 0]


def test_token_after_non_finite_logits_is_not_accepted():
    drafts = Drafts(np.zeros(4, int), np.arange(4), np.array([1, 2, 3, 4]), np.array([0]))
    sampled, nan = np.array([2, 3, 4, 5]), np.nan
    assert drafts.accepted(sampled, np.array([0, 0, nan, 0], np.float32)).tolist() == [1]
    assert drafts.accepted(sampled, np.zeros(4, np.float32)).tolist() == [3]
