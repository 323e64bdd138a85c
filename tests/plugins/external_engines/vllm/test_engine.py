"""The vLLM engine: the contract over HTTP, and version spans and log-probs during updates.

Run by `make test-vllm`, in a separate environment; tests that need no vLLM run everywhere.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from inference_contract.conformance import CheckOutcome, run
from inference_contract.conformance.session import Expected, Session, refused
from inference_contract.conformance.trainer import weights
from inference_contract.errors import InvalidRequest
from inference_contract.schemas import EngineState
from inference_contract.weights import DType, ParameterSpec, WeightLayout
from pipelinerl.component import missing_packages
from pipelinerl.config.recipe import MODELS
from pipelinerl.engines.http.server import create_app
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.weights.worker_endpoint import WorkerEndpointFactory
from pipelinerl.enums import WeightFormat
from pipelinerl.errors import ModelError, RecipeError
from pipelinerl.plugins.external_engines.vllm.engine import check_version, from_options, slow_here
from pipelinerl.plugins.external_engines.vllm.limits import (
    check_experts_on_cpu,
    check_experts_on_gpu,
    check_request,
    share_without_copy,
)
from pipelinerl.plugins.parameter_server.download import WeightPuller
from pipelinerl.plugins.warmstart.tiny_decoder import DecoderShape, char_tokenizer, random_decoder
from pipelinerl.registry import ENGINES
from tests.fakes.engine_options import engine_options
from tests.fakes.kit_updates import choices_of, logprobs_of, opened, publish, reference, trainer_of
from tests.fakes.sample_request import sample_request
from tests.fakes.served import in_thread
from tests.patience import PATIENCE_S
from trainer_contract.types import HeadPrecision, Kernels

CONTEXT = 256
#: How often to try a test with two concurrent requests, which a busy machine may run one after the other.
TRIES = 5
PROMPT = [7, 9, 11, 13, 15]
#: Longer than a block of vLLM's prefix cache, so that requests share cached blocks while the weights stay.
LONG_PROMPT = [5 + place % 41 for place in range(200)]

#: Seconds within which an engine must start: half a minute is usual, and five minutes occurred on a busy machine.
START_S = 600.0

#: Marks of tests with a real vLLM, which emits many warnings at import, and starts slowly on a busy machine.
real = [
    pytest.mark.vllm,
    pytest.mark.skipif(missing_packages(ENGINES["vllm"]), reason="vLLM is not installed; make test-vllm"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]


@dataclass(frozen=True)
class Served:
    """An engine behind HTTP, its initial model, and the directory of that model."""

    url: str
    model: Any
    folder: Path


def _served(folder, *, tied, devices=1):
    tokenizer = char_tokenizer()
    shape = DecoderShape(hidden=64, layers=2, heads=2, intermediate=48, vocab=len(tokenizer), max_positions=CONTEXT)
    model = random_decoder(shape)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    options = EngineOptions(
        model_path=folder,
        model_id="vllm",
        slots=16,
        max_waiting=256,
        context_length=CONTEXT,
        devices=devices,
        pull=WeightPuller(token="secret"),
    )
    with in_thread(create_app(from_options(options), token="secret"), starts_in_s=START_S) as url:
        yield Served(url, model, folder)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    yield from _served(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    yield from _served(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """An engine of two tensor-parallel workers."""
    yield from _served(tmp_path_factory.mktemp("shared"), tied=True, devices=2)


@pytest.fixture(params=["tied", pytest.param("untied", marks=pytest.mark.slow)])
def served(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def session(served):
    with opened(served.url) as session:
        yield session


# --- without vLLM ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["", "0.31.2", "0.33.0", "1.0"])
def test_unsupported_vllm_version_is_rejected(version):
    with pytest.raises(ModelError, match=r"0\.32\.x, installed is .*; install"):
        check_version(version)
    check_version("0.32.0")
    check_version("0.32.1+cpu")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"weights": WeightFormat.INT8}, "serves native weights only"),
        ({"dtype": "bfloat16", "head_precision": HeadPrecision.FP32}, "head_precision=model"),
        ({"kernels": Kernels.BATCH_INVARIANT}, r"no batch-invariant kernels; .*leave out model\.kernels"),
    ],
)
def test_vllm_engine_rejects_unsupported_options_before_it_starts(options, says, tmp_path):
    with pytest.raises(ModelError, match=says):
        from_options(
            EngineOptions(model_path=tmp_path, model_id="m", slots=1, max_waiting=1, context_length=CONTEXT, **options)
        )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("max_num_seqs", r"engine\.options\.max_num_seqs is set by engine\.slots; leave it out"),
        ("max_model_len", "is set by engine.context_length"),
        ("tensor_parallel_size", "is set by engine.devices"),
        ("gpu_memory_utilization", "is set by engine.memory_share"),
        ("scheduling_policy", "is set by the engine, which samples by priority"),
    ],
)
def test_vllm_options_that_other_engine_settings_determine_are_rejected_by_name(name, says, tmp_path):
    options = EngineOptions(
        model_path=tmp_path, model_id="m", slots=1, max_waiting=1, context_length=CONTEXT, options={name: 1}
    )
    with pytest.raises(RecipeError, match=says):
        from_options(options)


@pytest.mark.parametrize(
    ("chosen", "weight_bytes", "share", "copies"),
    [
        pytest.param(0.9, 16, 0.7, True, id="copy fits"),
        pytest.param(0.9, 25, 0.9, False, id="too large for a copy"),
        pytest.param(None, 16, 0.72, True, id="copy fits into the default share"),
        pytest.param(None, 25, 0.92, False, id="too large for the default share"),
    ],
)
def test_gpu_memory_share_of_vllm_shrinks_by_a_second_copy_of_the_weights_if_the_copy_fits(
    chosen, weight_bytes, share, copies
):
    assert share_without_copy(chosen, 80, weight_bytes, default=0.92) == (pytest.approx(share), copies)


@pytest.mark.parametrize("experts", [0, 4])
def test_mixture_of_experts_model_is_rejected_if_vllm_repacks_its_expert_weights(experts, tmp_path):
    config = {"num_hidden_layers": 2, "num_experts": experts, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="cannot load new ones") if experts else nullcontext():
        check_experts_on_cpu(tmp_path)
    with pytest.raises(ModelError, match="may shuffle the experts") if experts else nullcontext():
        check_experts_on_gpu(tmp_path, {})
    check_experts_on_gpu(tmp_path, {"moe_backend": "triton"})


@pytest.mark.parametrize(
    ("temperature", "refused"), [(0.0, False), (0.0099, True), (0.01, False), (2.0, False), (2.01, True)]
)
def test_temperatures_outside_the_range_that_vllm_supports_are_rejected(temperature, refused):
    request = sample_request([1], token_limit=1, temperature=temperature)
    with pytest.raises(InvalidRequest, match=r"vLLM samples at .*, got [02]\.0") if refused else nullcontext():
        check_request(request)


# --- with vLLM ---------------------------------------------------------------------------------------------------


class TestOptions:
    """Checks of `engine.options` and `engine.memory_share` against vLLM itself; no engine is started."""

    pytestmark = real

    @pytest.mark.parametrize(
        ("chosen", "says"),
        [
            ({"options": {"enforce_eager": False}}, r"engine\.options\.enforce_eager is set by the engine on a CPU"),
            (
                {"options": {"block_sise": 32}},
                r"block_sise is no field of vLLM's AsyncEngineArgs; did you mean block_s",
            ),
        ],
    )
    def test_vllm_options_that_are_unknown_or_reserved_are_rejected(self, chosen, says, tmp_path):
        with pytest.raises(ModelError, match=says):
            from_options(
                EngineOptions(
                    model_path=tmp_path, model_id="m", slots=1, max_waiting=1, context_length=CONTEXT, **chosen
                )
            )

    async def test_engine_options_are_passed_to_vllm_and_checked_by_it(self):
        from pipelinerl.plugins.external_engines.vllm import core as vllm_core

        settings = engine_options(
            model_path=MODELS / "tiny_speller_heads32", memory_share=0.4, options={"block_size": 64, "max_logprobs": 7}
        )
        arguments = vllm_core._arguments(settings)
        assert (arguments.block_size, arguments.max_logprobs) == (64, 7)
        assert arguments.gpu_memory_utilization == 0.4
        assert vllm_core._arguments(replace(settings, memory_share=None)).gpu_memory_utilization > 0.8, "vLLM's own"
        layout = WeightLayout(parameters=(ParameterSpec(name="weight", shape=(1,), dtype=DType.FLOAT32),))
        for wrong in ({"block_size": "many"}, {"max_num_seqs": "x"}):
            with pytest.raises(ModelError, match=r"vLLM cannot serve .*: [^\n]+$") as refused:
                endpoints = WorkerEndpointFactory(frozenset())
                await vllm_core.VllmCore.start(replace(settings, options=wrong), layout, endpoints)
            if "block_size" in wrong:
                assert "block_size: Input should be a valid integer" in str(refused.value)


class TestReal:
    """Tests of real vLLM engines: with tied embeddings, with untied embeddings, and with two workers."""

    pytestmark = real

    def test_vllm_engine_passes_the_conformance_kit(self, served):
        expected = Expected(model=served.folder, precision="float32")
        results = run(served.url, token="secret", timeout_s=PATIENCE_S, expected=expected)
        reasons = {result.name: result.reason for result in results if result.outcome is not CheckOutcome.PASSED}
        assert "did not fill the cache" in reasons.pop("preempted_samples_compute_as_others")
        assert reasons == {}

    @pytest.mark.parametrize(
        "served",
        ["tied", *(pytest.param(name, marks=pytest.mark.slow) for name in ("untied", "shared"))],
        indirect=True,
    )
    def test_vllm_logprobs_equal_transformers_after_every_update(self, served, session):
        trainer = trainer_of(session)
        for tag in range(3):
            data = weights(trainer.layout, tag)
            version = publish(session, data)
            model = reference(served.model, trainer.layout, data)
            for prompt in (PROMPT, LONG_PROMPT):
                for choice in session.chat(n=4, seed=tag, max_tokens=24, prompt_token_ids=prompt).choices:
                    assert choice.version_spans == [(version, len(choice.token_ids or []))]
                    expected = logprobs_of(model, prompt, choice.token_ids or [])
                    assert torch.allclose(torch.tensor(choice.token_logprobs), expected, atol=2e-4)

    def test_short_vllm_request_finishes_while_an_earlier_long_one_runs(self, tied):
        """A request of several samples starts while a longer request runs, and ends before it."""

        def was_first():
            before = session.generated_tokens()
            long = asking.submit(session.chat, n=4, seed=1, max_tokens=220, prompt_token_ids=PROMPT)
            while session.generated_tokens() == before:
                time.sleep(0.001)
            short = session.chat(n=4, seed=2, max_tokens=1, prompt_token_ids=PROMPT)
            still_runs = not long.done()
            assert len(short.choices) == len(long.result().choices) == 4
            return still_runs

        with opened(tied.url) as session, ThreadPoolExecutor(1) as asking:
            assert any(was_first() for _ in range(TRIES))

    def test_vllm_starts_waiting_requests_with_the_lowest_priority_value_first(self, tied):
        """Two requests need twice as many slots as there are; an urgent third request ends while the second waits."""

        def was_first():
            before = session.generated_tokens()
            first = asking.submit(session.chat, n=16, seed=1, max_tokens=100, prompt_token_ids=PROMPT)
            while session.generated_tokens() == before:
                time.sleep(0.001)
            second = asking.submit(session.chat, n=16, seed=2, max_tokens=200, prompt_token_ids=PROMPT)
            while "waiting_sequences 16\n" not in session.get("/metrics").text and not first.done():
                time.sleep(0.001)
            session.chat(n=1, seed=3, max_tokens=1, prompt_token_ids=PROMPT, priority=-1)
            others_wait = "waiting_sequences 0\n" not in session.get("/metrics").text
            assert len(first.result().choices) == len(second.result().choices) == 16
            return others_wait

        with opened(tied.url) as session, ThreadPoolExecutor(2) as asking:
            assert any(was_first() for _ in range(TRIES))

    def test_vllm_answers_more_concurrent_prompts_than_fit_into_one_step(self, tied):
        """vLLM on CPU crashes on a seeded sample whose prompt it splits, so prompts must stay whole."""
        with opened(tied.url) as session, ThreadPoolExecutor(64) as asking:
            prompts = [[7 + (row + column) % 40 for column in range(CONTEXT - 8)] for row in range(64)]
            pending = [asking.submit(session.completed, max_tokens=4, prompt_token_ids=prompt) for prompt in prompts]
            for choice in choices_of([answer.result(PATIENCE_S) for answer in pending]):
                assert len(choice.token_ids or []) == 4


class TestDeath:
    pytestmark = real

    @pytest.mark.slow
    def test_death_of_vllms_core_fails_every_request_and_stops_the_engine(self, tmp_path):
        with (
            contextmanager(_served)(tmp_path, tied=True) as served,
            ThreadPoolExecutor(1) as asking,
            Session(served.url, token="secret", timeout_s=PATIENCE_S, host="127.0.0.1") as session,
        ):
            before = session.generated_tokens()
            pending = asking.submit(session.completed, n=16, max_tokens=200, prompt_token_ids=PROMPT)
            while session.generated_tokens() == before:
                assert not pending.done(), pending.result().text
            cores = [child for child in psutil.Process().children() if "EngineCore" in child.name()]
            max(cores, key=lambda core: core.create_time()).kill()
            refused(pending.result(PATIENCE_S), 503, code="engine_stopped")
            refused(session.completed(), 503, code="engine_stopped")
            assert session.health().state is EngineState.STOPPED


@pytest.mark.parametrize(
    ("line", "slow"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_vnni", {"bfloat16", "float16"}),
        ("flags\t\t: fpu avx512f avx512_bf16", {"float16"}),
        ("flags : amx_bf16 amx_tile avx512_fp16", set()),
        ("Features\t: fp asimd asimdhp bf16", set()),
        ("model name : flags are not listed", set()),
    ],
)
def test_dtype_for_which_the_cpu_has_no_instructions_gives_a_slowness_warning(tmp_path, line, slow):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\n{line}\n\nprocessor : 1\nflags : avx512_bf16 avx512_fp16\n")
    slow_dtypes = {dtype for dtype in ("float32", "bfloat16", "float16") if slow_here(dtype, cpuinfo=cpuinfo)}
    assert slow_dtypes == slow
    if slow_dtypes:
        warning = slow_here(min(slow_dtypes), cpuinfo=cpuinfo)
        assert warning is not None and "set engine.dtype=float32" in warning


def test_unreadable_cpu_flags_give_no_slowness_warning(tmp_path):
    assert slow_here("bfloat16", cpuinfo=tmp_path / "nowhere") is None
