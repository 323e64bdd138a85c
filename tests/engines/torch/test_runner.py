"""Batched decoding with a KV cache equals a slow reference, which recomputes the whole sequence for each token.

Each architecture is tested with transformers' modules, and some also with the forward that calls no modules.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import transformers as hf

from pipelinerl import rng
from pipelinerl.engines.batching.model_runner import Prefill
from pipelinerl.engines.torch import decoder, weights
from pipelinerl.engines.torch.decoder import LlamaForward
from pipelinerl.engines.torch.forward import ModuleForward, load_for_decoding
from pipelinerl.engines.torch.page_cache import CacheReading
from pipelinerl.engines.torch.runner import TorchRunner
from tests.fakes.eager_graphs import use_eager_graphs
from tests.fakes.engine_options import engine_options
from tests.fakes.torch_rows import Row, bytes_of, decode, place, prefilled, start, swap
from trainer_contract.types import WeightDType

VOCAB, CONTEXT = 50, 96
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": CONTEXT,
}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ARCHITECTURES: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "qwen2_tied": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_BASE, tie_word_embeddings=True)),
    "qwen2_untied": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_BASE, tie_word_embeddings=False)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_BASE, head_dim=16)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_BASE)),
    "llama3_rope": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_BASE, rope_parameters=_LLAMA3_ROPE, mlp_bias=True)),
    "qwen2_window": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(**_BASE, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**_GPT2)),
    "mistral_window": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_BASE, sliding_window=6)),
    "gemma2_softcap": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**_BASE, head_dim=16, sliding_window=6)),
}
READINGS = [each for each in CacheReading if each is not CacheReading.KERNEL or find_spec("triton") is not None]
STRAIGHT = {"qwen2_tied", "qwen2_untied", "qwen2_window", "qwen3", "llama", "llama3_rope"}


@pytest.fixture(scope="session")
def directories(tmp_path_factory):
    """Random models with larger weights than at initialisation, so that attention matters."""
    root = tmp_path_factory.mktemp("models")
    for index, (name, build) in enumerate(ARCHITECTURES.items()):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            model = build()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(3)
        model.save_pretrained(root / name)
    return {name: root / name for name in ARCHITECTURES}


def _runner(path, *, modules=False, device="cpu", early=False, slots=8, context=CONTEXT):
    """Return a runner.

    With `modules`, it uses transformers' modules although the faster forward may fit the model. With `early`, it starts
    every step that it can before the tokens of the step before it are read.
    """
    model = load_for_decoding(path, dtype=WeightDType.FLOAT32, device=torch.device(device))
    runner = TorchRunner(model, engine_options(slots=slots, context_length=context), starts_early=early or None)
    if early:
        runner.early_step.allowed = True
    if modules:
        runner._forward = ModuleForward(model)
    return runner


def _inverse_cdf(logp, noise_key, position):
    noise = rng.uniform(np.array([noise_key], dtype=np.uint64), np.array([position]))[0]
    cumulative = np.cumsum(logp.exp().numpy())
    return int(np.searchsorted(cumulative, noise * cumulative[-1], side="right"))


def _reference(model, row):
    """Sample the tokens of the row again, with one full forward pass per token; return tokens and log-probs."""
    tokens, logprobs = list(row.prompt), []
    for position in range(len(row.sampled)):
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].double()
        logp = (logits / (row.temperature or 1.0)).log_softmax(-1)
        token = int(logp.argmax()) if row.temperature == 0 else _inverse_cdf(logp, row.noise_key, position)
        tokens.append(token)
        logprobs.append(float(logp[token]))
    return tokens[len(row.prompt) :], logprobs


def _agree(path, rows, within=1e-5):
    model = hf.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    for row in rows:
        token_ids, logprobs = _reference(model, row)
        assert row.sampled == token_ids
        assert row.logprobs == pytest.approx(logprobs, abs=within)


def _prompt(seed, length):
    return rng.generator(seed, "prompt").integers(0, VOCAB, length).tolist()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_forward_pass_without_torch_modules_is_chosen_only_for_supported_architectures(directories, name):
    expected = LlamaForward if name in STRAIGHT else ModuleForward
    assert isinstance(_runner(directories[name])._forward, expected)


def test_forward_pass_without_torch_modules_does_not_fit_unknown_rotary_embeddings():
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32, **factors}
    assert not LlamaForward.fits(hf.LlamaForCausalLM(hf.LlamaConfig(**_BASE, rope_parameters=rope)))


@pytest.mark.parametrize(("name", "products"), [("llama", 4), ("qwen3", 4), ("qwen2_untied", 6)])
def test_projections_of_one_input_without_biases_are_fused_on_a_gpu_even_after_a_weight_swap(
    directories, name, products, monkeypatch
):
    runner, calls = _runner(directories[name]), []
    assert isinstance(runner._forward, LlamaForward)
    runner._forward._joins = True  # as on a GPU

    def counted(*arguments):
        calls.append(arguments)
        return torch.nn.functional.linear(*arguments)

    monkeypatch.setattr(decoder, "linear", counted)
    rows = [Row(_prompt(i, 5 + i), noise_key=i) for i in range(3)]
    start(runner, rows)
    for _ in range(2):
        calls.clear()
        decode(runner, rows, 1)
        assert len(calls) == products * len(runner._forward._layers) + 1
        swap(runner, _bytes_of(directories[name], runner))
    _agree(directories[name], rows)


@pytest.mark.parametrize("modules", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_prompt_reuses_the_kv_cache_of_a_shared_prefix(directories, name, modules):
    """Prompts share 70 tokens: the first is computed whole, and the others from token 64 on, in one forward pass."""
    runner, common = _runner(directories[name], modules=modules), _prompt(0, 70)
    rows = [Row(common + _prompt(i, 3 + i), noise_key=i) for i in range(1, 5)]
    rows += [Row(_prompt(9, 12), noise_key=9)]
    prefills = [Prefill(row.prompt[:-1], [index]) for index, row in enumerate(rows)]
    assert prefilled(runner, prefills) == [(2, 73), (3, 76 - 64)]
    place(runner, rows)
    decode(runner, rows, 4)
    _agree(directories[name], rows)

    late = Row(common + _prompt(7, 2), noise_key=7)  # the prefix is cached by running rows, one of which moves
    runner.move([4], [1])
    assert prefilled(runner, [Prefill(late.prompt[:-1], [4, 5])]) == [(1, 7)]
    runner.place([late.state(4)])
    kept = [rows[0], rows[4], *rows[2:4], late]
    decode(runner, kept, 3)
    _agree(directories[name], kept)


def test_kv_cache_of_earlier_weights_is_not_reused(directories):
    runner, prompt = _runner(directories["llama"]), _prompt(0, 70)
    assert prefilled(runner, [Prefill(prompt, [0])]) == [(1, 70)]
    assert prefilled(runner, [Prefill(prompt, [1])]) == [(1, 6)]
    runner.swap()
    assert prefilled(runner, [Prefill(prompt, [2])]) == [(1, 70)]


@pytest.mark.parametrize("modules", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_batch_rows_with_equal_tokens_are_computed_only_once_until_they_diverge(directories, name, modules):
    """At low temperatures, the rows of two groups sample equal tokens for a while; one group's prompt is not cached."""
    runner = _runner(directories[name], modules=modules)
    one, other = _prompt(1, 9), _prompt(2, 1)
    rows = [Row(one, 0.0)] + [Row(one, 0.3, noise_key=i) for i in range(3)]
    rows += [Row(other, 0.3, noise_key=i) for i in range(2)] + [Row(_prompt(3, 9), noise_key=9)]
    runner.prefill([Prefill(one[:-1], range(4)), Prefill(rows[6].prompt[:-1], [6])])
    place(runner, rows)
    fed = _fed(runner)
    decode(runner, rows, 6)
    late = Row(one, noise_key=5)
    runner.copy_cache(0, [7], 8)
    runner.place([late.state(7)])
    rows.append(late)
    runner.move([7], [3])  # row 3 has ended
    kept = [*rows[:3], late, *rows[4:7]]
    decode(runner, kept, 5)
    _agree(directories[name], rows)
    assert fed[0] == 3 and max(fed) <= 7
    prefixes = [len({(*row.prompt, *row.sampled[:step]) for row in rows[:7]}) for step in range(6)]
    assert fed[:6] == [count if count <= 6 else 7 for count in prefixes]


@pytest.mark.parametrize(
    ("reading", "batches"),
    [
        (CacheReading.IN_PLACE, 10),
        (CacheReading.GATHERED, 5),
        pytest.param(CacheReading.IN_PLACE, 1000, marks=pytest.mark.slow),
    ],
)
def test_sampled_tokens_do_not_depend_on_whether_equal_rows_are_computed_once(
    directories, reading, batches, monkeypatch
):
    """Groups begin, diverge, end, move and swap weights at random, with short blocks, so that the cache often grows."""
    monkeypatch.setattr("pipelinerl.engines.torch.page_cache.BLOCK", 2)
    random = np.random.default_rng(batches)
    one, other = (_runner(directories["qwen3"], slots=48, context=24) for _ in range(2))
    one._cache.reading = other._cache.reading = reading
    other._alike = None
    fed, rows, present = _fed(one), [], one._cache._present[False]
    decoded = 0
    for batch in range(batches):
        if len(rows) < 40:
            prompt = _prompt(int(random.integers(3)), int(random.integers(1, 9)))
            temperature = random.choice([0.0, 0.2, 1.0])
            group = [
                Row(prompt, temperature, noise_key=100 * batch + i) for i in range(random.integers(1, 49 - len(rows)))
            ]
            at = range(len(rows), len(rows) + len(group))
            for runner in (one, other):
                if len(prompt) > 1:
                    runner.prefill([Prefill(prompt[:-1], at)])
                runner.place([row.state(index) for index, row in zip(at, group, strict=True)])
            rows += group
        for _ in range(random.integers(1, 6)):
            results = [runner.decode(len(rows)) for runner in (one, other)]
            assert results[0][0] == results[1][0]
            np.testing.assert_allclose(*(logprobs for _, logprobs in results), atol=2e-5)
            decoded += len(rows)
            for row, token_id in zip(rows, results[0][0], strict=True):
                row.sampled.append(token_id)
            ended = {i for i, row in enumerate(rows) if random.random() < 0.1 or len(row.prompt + row.sampled) >= 24}
            kept = len(rows) - len(ended)
            targets = [index for index in range(kept) if index in ended]
            sources = [index for index in range(kept, len(rows)) if index not in ended]
            for runner in (one, other):
                runner.release(sorted(ended))
                if sources:
                    runner.move(sources, targets)
            for source, target in zip(sources, targets, strict=True):
                rows[target] = rows[source]
            del rows[kept:]
            if not rows:
                break
        if random.random() < 0.2:
            weights = _bytes_of(directories["qwen3"], one).view(torch.float32) * random.choice([0.9, 1.0])
            for runner in (one, other):
                swap(runner, weights.view(torch.uint8))
    assert sum(fed) < 0.8 * decoded and one._cache._present[False] > present


def _fed(runner):
    """Return a list to which each later decode step appends the number of rows that the model computes."""
    forward, counts = runner._forward, []

    class Counting:
        fill = forward.fill

        def logits(self, token_ids, *rest):
            counts.append(len(token_ids))
            return forward.logits(token_ids, *rest)

    runner._forward = Counting()
    return counts


def test_step_that_started_early_is_used_for_rows_that_stay_and_discarded_when_rows_join(directories):
    """Six rows decode; two end, so the last two move; then two join; then the weights are swapped and swapped back."""
    path = directories["llama"]
    runner = _runner(path, early=True)
    rows, fed = [Row(_prompt(i, 4 + 9 * i), noise_key=i) for i in range(6)], _fed(runner)
    start(runner, rows)
    decode(runner, rows, 3)
    assert len(fed) == 4, "the fourth step has started"
    runner.release([1, 2])
    runner.move([5, 4], [1, 2])
    running = [rows[0], rows[5], rows[4], rows[3]]
    decode(runner, running, 1)
    assert len(fed) == 4, "the fourth step was used, and none started, because rows had moved"
    decode(runner, running, 1)
    assert len(fed) == 6
    late = [Row(_prompt(8, 20), temperature=0.5, noise_key=8), Row(_prompt(9, 1), noise_key=9)]
    start(runner, late, at=4)
    running += late
    decode(runner, running, 2)
    assert len(fed) == 6 + 3, "the step that had started without the new rows was computed again with them"
    for _ in range(2):
        swap(runner, _bytes_of(path, runner))
        decode(runner, running, 2)
    assert len(fed) == 9 + 2 * 3
    _agree(path, [*rows, *late])


def test_no_step_starts_early_beyond_the_context(directories):
    runner = _runner(directories["llama"], early=True)
    row = Row(_prompt(1, CONTEXT - 3), noise_key=1)
    start(runner, [row])
    for started in (True, True, True, False):
        decode(runner, [row], 1)
        assert runner.early_step.started == started
    _agree(directories["llama"], [row])


def test_no_step_starts_early_without_free_blocks_for_all_rows(directories):
    """The cache has three blocks of 32 tokens; each of two rows needs a second block for position 32."""
    model = load_for_decoding(directories["llama"], dtype=WeightDType.FLOAT32, device=torch.device("cpu"))
    block = _runner(directories["llama"])._block_bytes
    runner = TorchRunner(model, engine_options(slots=2, context_length=64), cache_bytes=3 * block, starts_early=True)
    runner.early_step.allowed = True
    rows = [Row(_prompt(key, 31), noise_key=key) for key in range(2)]
    start(runner, rows)
    for started in (True, False):
        decode(runner, rows, 1)
        assert runner.early_step.started == started
    assert not runner.reserve(2)
    _agree(directories["llama"], rows)


def test_step_with_truncated_sampling_does_not_start_early(directories):
    runner = _runner(directories["llama"], early=True)
    row = Row(_prompt(1, 5), noise_key=1)
    start(runner, [row])
    runner.place([replace(row.state(0), top_k=3)])
    decode(runner, [row], 2)
    assert not runner.early_step.started


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2_softcap"])
def test_next_turn_of_a_conversation_computes_only_its_new_tokens(directories, name):
    """The number of tokens that a turn computes does not grow with the conversation."""
    path = directories[name]
    runner, conversation, computed = _runner(path), _prompt(0, 20), []
    for turn in range(4):
        row = Row(conversation, noise_key=turn)
        computed += prefilled(runner, [Prefill(row.prompt[:-1], [0])])
        runner.place([row.state(0)])
        decode(runner, [row], 8)
        _agree(path, [row])
        runner.release([0])
        conversation = [*row.prompt, *row.sampled, *_prompt(100 + turn, 4)]
    assert [tokens for _, tokens in computed] == [19, 31, 11, 23], "less than a block of 32 is computed again"


@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma2_softcap"])
def test_every_method_of_reading_the_paged_kv_cache_gives_the_same_tokens(directories, name):
    """Rows share cache blocks, fit into one block, or have scattered blocks. On a CPU, triton interprets the kernel."""
    for reading in READINGS:
        runner = _runner(directories[name])
        runner._cache.reading = reading
        short = [Row(_prompt(i, 5), noise_key=i) for i in range(6)]
        start(runner, short)
        decode(runner, short, 2)
        runner.release(range(6))
        common = _prompt(9, 40)
        rows = [Row(common, noise_key=i) for i in range(3)] + [Row(_prompt(i, 3 + 20 * i), noise_key=i) for i in (1, 2)]
        runner.prefill([Prefill(common[:-1], range(3)), *(Prefill(rows[i].prompt[:-1], [i]) for i in (3, 4))])
        place(runner, rows)
        decode(runner, rows, 5)
        _agree(directories[name], [*short, *rows])


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gpu_decoding_equals_recomputation_while_rows_join_and_leave(directories, name, early):
    runner = _runner(directories[name], device="cuda", early=early)
    assert (runner._graphs is not None) == (name in STRAIGHT)
    _join_and_leave(runner, directories[name], steps=(10, 3, 30, 5, 5), within=1e-4)


@pytest.mark.skipif(find_spec("triton") is None, reason="the kernels that CUDA graphs contain need triton")
@pytest.mark.parametrize(
    ("early", "steps"),
    [
        (True, (2, 1, 1, 1, 2)),
        pytest.param(True, (6, 3, 4, 5, 5), marks=pytest.mark.slow),
        pytest.param(False, (6, 3, 4, 5, 5), marks=pytest.mark.slow),
    ],
)
def test_decoding_with_cuda_graphs_equals_recomputation_while_rows_join_and_leave(tmp_path, early, steps, monkeypatch):
    """On a CPU, a graph is replaced by a function that computes the step again, and triton interprets the kernels."""
    small = _BASE | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hf.Qwen3ForCausalLM(hf.Qwen3Config(**small, head_dim=16, initializer_range=0.3)).save_pretrained(tmp_path)
    runner = _runner(tmp_path, early=True)
    runner.early_step.allowed = early
    use_eager_graphs(runner, monkeypatch)
    runner.warm_up()
    assert runner._graphs is not None
    captured = set(runner._graphs._graphs)
    assert len(captured) == 3 * 2, "2, 4 and 8 rows, each with both weight buffers"
    _join_and_leave(runner, tmp_path, steps=steps, within=1e-5)
    assert set(runner._graphs._graphs) == captured, "a capture would wait for an update that is arriving"


def _join_and_leave(runner, path, *, steps, within):
    """Let rows of several lengths join, leave and move, with two weight swaps in between; one row uses top-k.

    `steps` are the numbers of steps from the start, after each swap, after one row has left, and after one has joined.
    """
    rows = [Row(_prompt(i, length), noise_key=i) for i, length in enumerate((9, 40, 4, 31, 1))]
    rows.append(Row(_prompt(7, 33), temperature=0.0))
    start(runner, rows)
    decode(runner, rows, steps[0])
    for count in steps[1:3]:
        swap(runner, _bytes_of(path, runner))
        decode(runner, rows, count)
    ended = rows[1]
    runner.release([1])
    runner.move([5], [1])
    rows = [rows[0], rows[5], *rows[2:5]]
    decode(runner, rows, steps[3])
    late = Row(_prompt(8, 20), temperature=0.5, noise_key=3)
    start(runner, [late], at=5)
    runner.place([replace(rows[2].state(2), top_k=3)])
    decode(runner, [*rows, late], steps[4])
    _agree(path, [row for row in (*rows, ended, late) if row is not rows[2]], within=within)


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3"])
@pytest.mark.filterwarnings("ignore")  # ignore warnings of torch's own compiler
def test_compiled_forward_pass_decodes_the_same_tokens_as_full_recomputation(directories, name, device):
    runner = _runner(directories[name], device=device)
    assert isinstance(runner._forward, LlamaForward)
    runner._forward.compile()
    rows = [Row(_prompt(i, length), noise_key=i) for i, length in enumerate((9, 40, 2))]
    start(runner, rows)
    decode(runner, rows, 5)
    _agree(directories[name], rows, within=1e-5 if device == "cpu" else 1e-4)


def _bytes_of(path, runner):
    return bytes_of(load_for_decoding(path, dtype=WeightDType.FLOAT32, device=runner._device))


def test_weight_swap_exchanges_buffers_without_copying_and_a_second_swap_reverts_it(directories):
    model = load_for_decoding(directories["llama"], dtype=WeightDType.FLOAT32, device=torch.device("cpu"))
    runner = TorchRunner(model, engine_options(slots=1, context_length=8))
    parameters = list(model.parameters())
    before = [parameter.data_ptr() for parameter in parameters]
    staging = runner.staging()
    runner.swap()
    inside = range(staging.data_ptr(), staging.data_ptr() + staging.numel())
    assert all(parameter.data_ptr() in inside for parameter in parameters)
    runner.swap()
    assert [parameter.data_ptr() for parameter in parameters] == before
    assert runner.staging().data_ptr() == staging.data_ptr()


def test_parameters_are_aligned_in_memory_although_they_arrive_back_to_back(directories, monkeypatch):
    """A parameter of odd size misaligns those after it; each of two buffers keeps its addresses, as graphs need."""
    model = load_for_decoding(directories["llama"], dtype=WeightDType.FLOAT32, device=torch.device("cpu"))
    shape = ModuleForward(model).cache_shape()
    model.model.layers[0].input_layernorm.weight.data = torch.ones(31, dtype=torch.bfloat16)
    first = [parameter.detach().clone() for parameter in model.parameters()]
    runner = TorchRunner(model, engine_options(slots=1, context_length=8), shape=shape)
    addresses = []
    monkeypatch.setattr(weights, "_MOVED", 100)

    def check(expected):
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected, strict=True))
        addresses.append([parameter.data_ptr() for parameter in model.parameters()])
        assert all(address % 16 == 0 for address in addresses[-1])

    check(first)
    second, third = ([value + number for value in first] for number in (1, 2))
    for sent in (second, third):
        swap(runner, torch.cat([value.reshape(-1).view(torch.uint8) for value in sent]))
        check(sent)
    runner.swap()
    check(second)
    assert addresses[0] == addresses[2] and addresses[1] == addresses[3]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_logprobs_stay_close_to_transformers(directories, dtype):
    model = load_for_decoding(directories["llama"], dtype=dtype, device=torch.device("cpu"))
    runner = TorchRunner(model, engine_options(slots=2, context_length=CONTEXT))
    rows = [Row(_prompt(i, 5 + i), noise_key=i) for i in range(2)]
    start(runner, rows)
    decode(runner, rows, 8)
    reference = hf.AutoModelForCausalLM.from_pretrained(directories["llama"], dtype=getattr(torch, dtype))
    for row in rows:
        tokens = row.prompt + row.sampled
        with torch.no_grad():
            logp = reference(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        expected = [float(logp[len(row.prompt) - 1 + i, token]) for i, token in enumerate(row.sampled)]
        assert row.logprobs == pytest.approx(expected, abs=0.15)
