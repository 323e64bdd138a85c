"""Stock (unmodified) vLLM and SGLang servers behind the contract; SGLang's is a fake, written from its sources.

These tests check versions and log-probs, which the conformance kit cannot. `make test-vllm` runs a real vLLM server.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI

from inference_contract.conformance import CheckOutcome, pull_checks, reference_checks, run, weight_checks
from inference_contract.conformance.session import Expected, refused
from inference_contract.conformance.trainer import weights
from inference_contract.errors import EngineStopped
from inference_contract.schemas import ChatCompletionRequest, ChatMessage, EngineState, FinishReason
from pipelinerl.component import missing_packages
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.batching.model_runner import Capacity
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.engines.http.server import create_app
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.weights.torch_shared_bytes import SharedBytes
from pipelinerl.enums import WeightFormat
from pipelinerl.errors import AddressError, ModelError
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.external_engines.core_loop import CoreLoop, CoreModel
from pipelinerl.plugins.external_engines.server.server_core import ServerCore, ServerHttp
from pipelinerl.plugins.external_engines.server.sglang_api import SglangServerApi
from pipelinerl.plugins.external_engines.vllm.server_api import VllmServerApi
from pipelinerl.plugins.parameter_server.download import WeightPuller
from pipelinerl.plugins.warmstart.tiny_decoder import DecoderShape, char_tokenizer, random_decoder
from pipelinerl.registry import ENGINES, load
from pipelinerl.trainers.torch.trainer import TorchTrainer
from pipelinerl.training.canary_check import Canary, Tolerance, check_canary
from pipelinerl.training.engine_proofs import EngineProofs
from pipelinerl.weights.grace import Grace
from pipelinerl.weights.publisher import PublishReport
from tests.fakes import sglang_server, stock_vllm
from tests.fakes.engine_options import engine_options
from tests.fakes.kit_updates import choices_of, logprobs_of, opened, publish, reference, trainer_of
from tests.fakes.sample_request import sample_request
from tests.fakes.scripted_engine import LAYOUT
from tests.fakes.served import in_thread
from tests.patience import PATIENCE_S, SOON_S
from trainer_contract.types import TrainerSpec

CONTEXT = 96
PROMPT = [7, 9, 11, 13, 15]

#: For each server, the checks of the conformance kit that fail, with a word of the error and, as comment, the cause.
SHORT_OF = {
    "sglang_server": {
        # SGLang reports log-probs from before top-k and top-p, so the engine rejects requests with them.
        "top_k_one_is_certain": "400",
        # The next three fail for the same reason as with vLLM below.
        "same_seed_same_samples": "log-probs",
        "stream_equals_whole": "token_logprobs",
        "fewer_chunks_give_the_same_answer": "token_logprobs",
    },
    "vllm_server": {
        # The server starts samples as they arrive, so batches, and thus rounding, differ between equal requests.
        "same_seed_same_samples": "log-probs",
        "stream_equals_whole": "token_logprobs",
        "fewer_chunks_give_the_same_answer": "token_logprobs",
    },
}

#: The checks of weight updates, for which an adapter differs most from other engines; slow tests run the whole kit.
OF_WEIGHTS = tuple(check.__name__ for check in (*weight_checks.CHECKS, *pull_checks.CHECKS))

vllm = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(missing_packages(ENGINES["vllm"]), reason="vLLM is not installed; make test-vllm"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]


@dataclass(frozen=True)
class Stock:
    """A running stock server, the engine type that uses it, its model, and the directory of the model."""

    kind: str
    url: str
    folder: Path
    model: Any
    server: Any = None

    def options(self, **changes):
        named = {
            "model_path": self.folder,
            "model_id": "m",
            "slots": 16,
            "max_waiting": 256,
            "context_length": CONTEXT,
            "pull": WeightPuller(token="secret"),
            "server": self.url,
        }
        return EngineOptions(**{**named, **changes})

    @contextmanager
    def engine(self, **changes):
        built = load("engine", ENGINES, self.kind)(self.options(**changes))
        with in_thread(create_app(built, token="secret"), starts_in_s=60.0) as url:
            yield url

    async def starts(self, **changes):
        engine = load("engine", ENGINES, self.kind)(self.options(**changes))
        try:
            await engine.start()
        finally:
            await engine.close()


def _written(folder):
    tokenizer = char_tokenizer()
    shape = DecoderShape(hidden=64, layers=1, heads=2, intermediate=32, vocab=len(tokenizer), max_positions=CONTEXT)
    model = random_decoder(shape)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    return model


@contextmanager
def _sglang(folder, **facts):
    model = _written(folder)
    server = sglang_server.SglangServer(model, context_length=facts.pop("context_length", CONTEXT))
    server.info |= facts
    with in_thread(sglang_server.create_app(server)) as url:
        yield Stock("sglang_server", url, folder, model, server)


@pytest.fixture(scope="module")
def sglang(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, _sglang(tmp_path_factory.mktemp("sglang")) as stock:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        yield stock


@pytest.fixture(scope="module")
def vllm_server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    model = _written(folder)
    with stock_vllm.serving(folder, folder / "log", *stock_vllm.AS_DOCUMENTED, context_length=CONTEXT) as url:
        yield Stock("vllm_server", url, folder, model)


@pytest.fixture(params=["sglang", pytest.param("vllm_server", marks=vllm)])
def stock(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("only", [OF_WEIGHTS, pytest.param(None, marks=pytest.mark.slow)], ids=["weights", "whole kit"])
def test_adapter_of_a_stock_server_fails_only_the_listed_conformance_checks(stock, only):
    with stock.engine() as url:
        results = run(url, token="secret", only=only, timeout_s=PATIENCE_S)
    short = {
        result.name: result.reason
        for result in results
        if result.outcome is not CheckOutcome.PASSED and "no model directory" not in result.reason
    }
    assert short.keys() <= SHORT_OF[stock.kind].keys(), short
    assert all(SHORT_OF[stock.kind][name] in reason for name, reason in short.items()), short


def test_stock_server_computes_as_transformers_after_updates_and_across_them(stock):
    # Neither server reports how often it has preempted samples.
    checks = [each for each in reference_checks.UPDATE_CHECKS if "preempted" not in each.__name__]
    only = [check.__name__ for check in checks]
    with stock.engine() as url:
        expected = Expected(model=stock.folder, temperature=0.7)
        results = run(url, token="secret", only=only, timeout_s=PATIENCE_S, expected=expected)
    assert {result.name: result.reason for result in results if result.outcome is not CheckOutcome.PASSED} == {}


def random_decoder_like(model):
    """Return a second random model with the configuration of `model`, because the server uses `model` itself."""
    return type(model)(model.config).eval()


def test_sample_aborted_by_the_stock_server_returns_its_tokens_as_aborted(stock):
    """The server has already streamed all tokens when it aborts the sample, so its last event contains no token."""
    stops = {
        "vllm_server": [("/pause?mode=abort", None), ("/resume", None)],
        "sglang_server": [("/pause_generation", {"mode": "abort"}), ("/continue_generation", {})],
    }
    with stock.engine() as url, opened(url) as session, ThreadPoolExecutor(1) as asking:
        before = session.generated_tokens()
        pending = asking.submit(session.completed, n=16, max_tokens=80, prompt_token_ids=PROMPT)
        while session.generated_tokens() == before:
            assert not pending.done(), pending.result().text
        for path, body in stops[stock.kind]:
            httpx.post(stock.url + path, json=body).raise_for_status()
        choices = choices_of([pending.result(PATIENCE_S)])
        assert any(choice.finish_reason is FinishReason.ABORT for choice in choices)
        lengths = [len(choice.token_ids or []) for choice in choices]
        # A sample that is aborted before its first token has no span.
        assert [choice.version_spans for choice in choices] == [[(0, n)] if n else [] for n in lengths]


# The thread of the engine ends with an exception in this test.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_engine_stops_when_another_client_loads_weights_into_its_server(stock):
    with stock.engine() as url, opened(url) as session:
        session.chat()
        body = {"new_version": "theirs"} | ({"abort_all_requests": False} if stock.kind == "sglang_server" else {})
        httpx.post(f"{stock.url}/update_weight_version", json=body).raise_for_status()
        refused(session.completed(), 503, code="engine_stopped")
        assert session.health().state is EngineState.STOPPED


class TestRefusals:
    """Unsupported settings are rejected with a message when the engine starts; the SGLang tests need no real server."""

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"server": None}, "engine.servers"),
            ({"weights": WeightFormat.INT8}, r"native weights only, .*engine\.weights=int8; leave it out"),
            ({"options": {"block_size": 1}}, "started with options of its own has no options, got engine.options bl"),
            ({"memory_share": 0.5}, "the adapter of a server uses no GPU memory, got engine.memory_share=0.5"),
        ],
    )
    @pytest.mark.parametrize("kind", ["sglang_server", "vllm_server"])
    def test_adapter_rejects_engine_options_that_a_stock_server_cannot_apply(self, kind, options, says, tmp_path):
        with pytest.raises(ModelError, match=says):
            load("engine", ENGINES, kind)(Stock(kind, "http://127.0.0.1:9", tmp_path, None).options(**options))

    @pytest.mark.parametrize(
        ("facts", "options", "says"),
        [
            ({"dp_size": 2}, {}, "one server for each replica"),
            ({"enable_deterministic_inference": False}, {}, "--enable-deterministic-inference"),
            ({"version": "0.5.18"}, {}, r"0\.5\.19 or later, got 0\.5\.18"),
            ({"version": "0.5.9.post1"}, {}, r"0\.5\.19 or later"),
            ({"version": None}, {}, r"0\.5\.19 or later"),
            ({"preferred_sampling_params": {"top_p": 0.9}}, {}, r"top_p.*without --preferred-sampling-params"),
            ({"quantization": "fp8"}, {}, "quantization = 'fp8'.*without --quantization"),
            ({"kv_cache_dtype": "fp8_e5m2"}, {}, "without --kv-cache-dtype"),
            ({"speculative_algorithm": "EAGLE"}, {}, "without --speculative-algorithm"),
            ({"lora_paths": {"a": "b"}}, {}, "without --lora-paths"),
            ({"json_model_override_args": '{"rope_theta": 1}'}, {}, "without --json-model-override-args"),
            ({"dtype": "bfloat16"}, {}, "--dtype float32"),
            ({"context_length": CONTEXT // 2}, {}, "at most the server's"),
        ],
    )
    async def test_sglang_server_whose_settings_differ_from_the_engine_options_is_rejected(
        self, facts, options, says, tmp_path
    ):
        with _sglang(tmp_path, **facts) as stock, pytest.raises(ModelError, match=says):
            await stock.starts(**options)

    async def test_sglang_server_that_reports_log_probs_before_the_temperature_is_rejected(self, tmp_path):
        with _sglang(tmp_path) as stock:
            stock.server.reports_original = True
            with pytest.raises(ModelError, match=r"before the temperature.*without SGLANG_RETURN_ORIGINAL_LOGPROB"):
                await stock.starts()

    @pytest.mark.parametrize(
        ("section", "facts", "says"),
        [
            ("model_config", {"quantization": "fp8"}, "it has quantization = 'fp8'; start it with no --quantization"),
            ("cache_config", {"cache_dtype": "fp8"}, "start it with no --kv-cache-dtype"),
            ("weight_transfer_config", {"backend": "nccl"}, "it uses nccl; start it with --worker-ext"),
            ("model_config", {"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
            ("scheduler_config", {"enable_chunked_prefill": True}, "--no-enable-chunked-prefill"),
        ],
    )
    @pytest.mark.parametrize("vllm_server", [pytest.param(None, marks=vllm)], indirect=True)
    async def test_vllm_server_with_wrong_flags_is_rejected(self, section, facts, says, vllm_server):
        front = stock_vllm.saying(vllm_server.url, section, facts)
        with in_thread(front) as url, pytest.raises(ModelError, match=says):
            await vllm_server.starts(server=url)

    @pytest.mark.parametrize("vllm_server", [pytest.param(None, marks=vllm)], indirect=True)
    async def test_adapter_resumes_a_vllm_server_that_was_left_paused(self, vllm_server):
        """An adapter killed during an update leaves its server paused, and a paused server answers no requests."""
        httpx.post(f"{vllm_server.url}/pause?mode=keep", trust_env=False).raise_for_status()
        await vllm_server.starts()

    @pytest.mark.parametrize("vllm_server", [pytest.param(None, marks=vllm)], indirect=True)
    def test_adapter_can_update_a_vllm_server_that_was_left_in_an_open_weight_update(self, vllm_server):
        for order in ("/pause?mode=keep", "/start_weight_update"):
            httpx.post(vllm_server.url + order, trust_env=False).raise_for_status()
        with vllm_server.engine() as url, opened(url) as session:
            publish(session, weights(trainer_of(session).layout, 7))
            # as a cancelled update leaves it
            httpx.post(vllm_server.url + "/start_weight_update", trust_env=False).raise_for_status()
            publish(session, weights(trainer_of(session).layout, 8))

    @pytest.mark.parametrize(
        ("version", "says", "warns"),
        [
            ("0.31.2", "0.32 or later, got 0.31.2", False),
            ("dev", "0.32 or later, got dev", False),
            ("0.32.1", "VLLM_SERVER_DEV_MODE", False),
            ("0.33.0", "VLLM_SERVER_DEV_MODE", True),
        ],
    )
    async def test_vllm_server_of_a_later_version_than_the_tested_one_is_accepted_with_a_warning(
        self, version, says, warns, tmp_path, caplog
    ):
        """The server has no other routes, so the check that follows the version's fails."""
        app = FastAPI()
        app.get("/version")(lambda: {"version": version})
        _written(tmp_path)
        with in_thread(app) as url, pytest.raises(ModelError, match=says):
            await Stock("vllm_server", url, tmp_path, None).starts()
        assert ("not run with this version" in caplog.text) is warns

    @pytest.mark.parametrize("version", ["0.5.19", "0.5.21", "0.5.23.post1"])
    def test_adapter_updates_a_sglang_server_of_every_supported_version(self, version, tmp_path):
        with _sglang(tmp_path, version=version) as stock, stock.engine() as url, opened(url) as session:
            for tag in (1, 2):
                publish(session, weights(trainer_of(session).layout, tag))
            assert not stock.server.session_open

    def test_adapter_can_update_a_sglang_server_that_was_left_in_an_open_weight_update(self, sglang):
        """An adapter killed during an update leaves its server paused in an open session."""
        for path, body in (("/pause_generation", {"mode": "in_place"}), ("/begin_weight_update", {})):
            httpx.post(sglang.url + path, json=body).raise_for_status()
        with sglang.engine() as url, opened(url) as session:
            publish(session, weights(trainer_of(session).layout, 7))
            httpx.post(sglang.url + "/begin_weight_update", json={}).raise_for_status()  # as a failed update leaves it
            publish(session, weights(trainer_of(session).layout, 8))

    async def test_engine_start_fails_if_its_server_is_unreachable(self, sglang):
        with pytest.raises(AddressError, match=r"127\.0\.0\.1:9.*is http://127\.0\.0\.1:9 running"):
            await sglang.starts(server="http://127.0.0.1:9")


def test_fake_sglang_server_rejects_invalid_requests(sglang):
    with httpx.Client(base_url=sglang.url) as http:
        order = {"rid": "r", "input_ids": [7], "stream": True, "sampling_params": {"max_new_tokens": 2}}
        assert http.post("/generate", json=order | {"no_such_field": 1}).status_code == 422
        assert http.post("/generate", json=order | {"input_ids": [7] * CONTEXT}).status_code == 400
        update = {"names": ["w"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "never joined"}
        assert "must run between" in http.post("/update_weights_from_distributed", json=update).json()["message"]
        assert http.post("/end_weight_update", json={}).status_code == 400
        assert http.post("/begin_weight_update", json={}).status_code == 200
        assert http.post("/begin_weight_update", json={}).status_code == 400
        assert "not in" in http.post("/update_weights_from_distributed", json=update).json()["message"]
        assert http.post("/end_weight_update", json={}).status_code == 200
        assert http.post("/destroy_weights_update_group", json={"group_name": "never joined"}).status_code == 400
        events = [line for line in http.post("/generate", json=order).text.splitlines() if line]
        assert events[-1] == "data: [DONE]"
        metas = [json.loads(line.removeprefix("data: "))["meta_info"] for line in events[:-1]]
        assert [meta["completion_tokens"] for meta in metas] == [1, 2]
        assert "weight_versions" not in metas[0] and [span["end"] for span in metas[1]["weight_versions"]] == [2]


@pytest.mark.parametrize("new_api", [SglangServerApi, VllmServerApi])
async def test_request_to_a_stock_server_states_every_parameter_of_the_distribution(new_api):
    """A server may have defaults of its own, such as the model's generation_config."""
    request = sample_request([7], token_limit=8, temperature=0.7, streams=True, stop_ids=frozenset({3, 5}))
    request.add_sequence(0)
    http = ServerHttp("http://127.0.0.1:9")
    with SharedBytes(1) as nothing:
        order = new_api(http, LAYOUT, nothing).order(request.sequences[0], salt="")
    await http.close()
    unbounded = {SglangServerApi: ("top_k", "min_new_tokens"), VllmServerApi: ("top_k", "min_tokens")}[new_api]
    sampling = order["sampling_params"]
    assert (sampling["temperature"], sampling["top_p"], sampling["repetition_penalty"]) == (0.7, 1.0, 1.0)
    assert all(sampling[name] == 0.0 for name in ("min_p", "frequency_penalty", "presence_penalty"))
    assert all(sampling[name] in (0, -1) for name in unbounded)
    assert sampling["stop_token_ids"] == [3, 5]
    assert sampling["ignore_eos"] is (new_api is VllmServerApi), "SGLang would not end at stop tokens either"


@pytest.mark.slow
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.3}, {"top_k": 3}])
async def test_engine_whose_stock_server_truncates_samples_in_secret_does_not_join(
    sglang, truncation, tmp_path, monkeypatch
):
    """The server reports the policy's log-probs, so only the samples show it."""
    kept = sglang_server._kept
    monkeypatch.setattr(
        sglang_server, "_kept", lambda logprobs, given: kept(logprobs, given.model_copy(update=truncation))
    )
    with sglang.engine() as url, opened(url) as session:
        layout = trainer_of(session).layout
        data = weights(layout, 1)
        version = publish(session, data)
        reference(random_decoder_like(sglang.model), layout, data).save_pretrained(tmp_path)
        trainer = TorchTrainer()
        trainer.init_worker(TrainerSpec(model_path=tmp_path))
        proofs = EngineProofs(trainer, trainer.weight_layout())

        async def forward(batch):
            return proofs.score(batch)

        canary = Canary(
            messages=(ChatMessage(role="user", content="hello"),),
            tolerance=Tolerance(worst=2e-4),
            context_length=CONTEXT,
            tokens=48,
        )
        report = PublishReport(
            version=version, epoch=session.card().epoch, digest="", send_s=0, total_s=0, pauses_s={}, failed={}
        )
        async with EngineClient(token="secret") as client:
            findings = await check_canary(canary, client, Grace(), [url], report, forward)
        assert findings.worst, findings
        reason = proofs.joined(url, findings.compared[url])
        assert ("its samples do not follow the policy" in reason) == bool(truncation), reason


def test_prefixes_that_an_earlier_run_cached_on_a_stock_server_are_not_reused(sglang):
    """Versions of another run have the same names, and the server's cache outlives the run."""
    salts = []
    for _ in range(2):
        sglang.server.salts.clear()
        with sglang.engine() as url, opened(url) as session:
            session.chat()
        salts.append({salt for salt in sglang.server.salts if salt is not None})
    assert salts[0] and salts[1] and salts[0].isdisjoint(salts[1])


def test_policy_logprobs_of_an_sglang_server_equal_transformers_while_top_k_and_top_p_truncate(sglang):
    with sglang.engine() as url, opened(url) as session:
        layout = trainer_of(session).layout
        data = weights(layout, 1)
        publish(session, data)
        model = reference(random_decoder_like(sglang.model), layout, data)
        for truncation in ({"top_k": 2}, {"top_p": 0.2}):
            fields = {"n": 4, "seed": 3, "max_tokens": 12, "prompt_token_ids": PROMPT, "ignore_eos": True}
            for choice in session.chat(**fields, **truncation, policy_logprobs=True).choices:
                tokens = choice.token_ids or []
                expected = logprobs_of(model, PROMPT, tokens)
                assert torch.allclose(torch.tensor(choice.token_logprobs), expected, atol=2e-4)
                with torch.inference_mode():
                    after = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
                likelier = after > after.gather(1, torch.tensor(tokens)[:, None])
                assert int(likelier.sum(1).max()) < truncation.get("top_k", len(after[0]))
                assert float((after.exp() * likelier).sum(1).max()) < truncation.get("top_p", 1.0) + 1e-4
            error = refused(session.completed(**fields, **truncation), 400)
            assert "policy_logprobs=true" in error["message"]


# The thread of the engine ends with an exception in this test.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_engine_stops_when_its_server_fails_health_checks(tmp_path):
    """A sample may take any time while the server passes health checks; if the server hangs, its requests fail."""
    silence_s = 3.0

    def loop(deliver):
        return CoreLoop(start_core=start_core, capacity=Capacity(4, 4), deliver=deliver)

    async def start_core():
        http = ServerHttp(stock.url)
        api = SglangServerApi(http, LAYOUT, nothing)
        core = ServerCore(api, http, serving=(0, 0), silence_s=silence_s, ask_every_s=silence_s / 10)
        return core, CoreModel(
            slots=4, context_length=CONTEXT, vocab_size=50, layout=LAYOUT, cache_bytes=0, staged=None
        )

    with _sglang(tmp_path) as stock, SharedBytes(1) as nothing:
        stock.server.version = "0.0"
        engine = BatchingEngine(engine_options(), loop=loop, tokenizer=ChatTokenizer.load(stock.folder))
        await engine.start()
        request = ChatCompletionRequest(prompt_token_ids=PROMPT, max_tokens=2)
        async with asyncio.timeout(PATIENCE_S):
            await engine.complete(request)
            stock.server.continued.clear()  # the server is paused, but passes health checks
            pending = asyncio.create_task(engine.complete(request))
            await asyncio.sleep(1.5 * silence_s)
            assert not pending.done() and engine.health().state is EngineState.READY
            stock.server.silent, began = True, time.monotonic()
            with pytest.raises(EngineStopped):
                await pending
            assert engine.health().state is EngineState.STOPPED
            await engine.close()
            assert time.monotonic() - began < SOON_S, "who leaves it waits for no answer of its"


async def test_adapter_raises_the_file_descriptor_limit_for_concurrent_streams():
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft // 2, hard))
    try:
        await ServerHttp("http://127.0.0.1:9").close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
