"""The torch engine on mixtures of experts: it serves them, and reports the experts of each token."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from inference_contract.conformance import CheckOutcome, run
from inference_contract.schemas import AnswerPrefix, ChatCompletionRequest
from inference_contract.weights import OnUpdate
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.http.server import create_app
from pipelinerl.engines.torch.engine import from_options, load_runner
from pipelinerl.numerics.routed_experts import off_the_wire
from tests.fakes.engine_options import engine_options
from tests.fakes.gated_runner import GatedRunner
from tests.fakes.mixtures import CONTEXT, ROUTING, save_mixture
from tests.fakes.served import in_thread
from tests.fakes.torch_rows import bytes_of
from tests.patience import PATIENCE_S
from trainer_contract.types import Device

PROMPT = [7, 8, 9, 10, 11]
#: Checks of the conformance kit that depend on expert weights or their names.
OF_EXPERTS = ["routed_experts_are_returned_or_refused", "update_is_served"]


@pytest.fixture(scope="session")
def mixture(tmp_path_factory):
    return save_mixture(tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture
def options(mixture):
    return engine_options(model_path=mixture, slots=4, context_length=CONTEXT, device=Device.CPU, threads=1)


@pytest.fixture
async def gate_and_engine(options, endless):
    gate = GatedRunner(load_runner(options))
    engine = BatchingEngine(options, load=lambda: gate, tokenizer=endless)
    await engine.start()
    yield gate, engine
    gate.open()
    await engine.close()


@pytest.fixture
async def engine(gate_and_engine):
    gate_and_engine[0].open()
    return gate_and_engine[1]


def request_with(**fields):
    known = {"prompt_token_ids": PROMPT, "n": 3, "max_tokens": 9, "seed": 5, "return_token_ids": True}
    return ChatCompletionRequest(**{**known, "return_routed_experts": True, **fields})


def reported(routed):
    assert routed is not None
    return off_the_wire(routed)


def chosen_by(path, token_ids):
    """Return the experts [tokens, layers, top_k] that transformers' own model chooses in one forward pass."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([token_ids]), output_router_logits=True).router_logits
    return torch.stack([each.topk(ROUTING.top_k, dim=-1).indices for each in logits], dim=1).numpy()


async def test_reported_experts_equal_those_that_transformers_chooses(engine, mixture):
    """The request has more samples than the engine has rows, and a second request does not ask for routing."""
    quiet = engine.complete(request_with(n=1, return_routed_experts=False))
    answer, silent = await engine.complete(request_with(n=6)), await quiet
    assert silent.prompt_routed_experts is None and silent.choices[0].routed_experts is None
    for choice in answer.choices:
        tokens = PROMPT + (choice.token_ids or [])
        rows = np.concatenate((reported(answer.prompt_routed_experts), reported(choice.routed_experts)))
        np.testing.assert_array_equal(rows, chosen_by(mixture, tokens)[:-1])


async def test_answer_to_a_prompt_of_one_token_reports_no_prompt_experts(engine, mixture):
    answer = await engine.complete(request_with(prompt_token_ids=[7], n=1))
    assert reported(answer.prompt_routed_experts).shape == (0, ROUTING.layers, ROUTING.top_k)
    (choice,) = answer.choices
    np.testing.assert_array_equal(
        reported(choice.routed_experts), chosen_by(mixture, [7, *(choice.token_ids or [])])[:-1]
    )


async def test_continued_answer_reports_only_the_experts_of_its_new_tokens(engine):
    whole = await engine.complete(request_with(n=1))
    (choice,) = whole.choices
    prefix = AnswerPrefix(index=0, token_ids=(choice.token_ids or [])[:4])
    rest = await engine.complete(request_with(n=1, prefixes=[prefix]))
    assert rest.prompt_routed_experts == whole.prompt_routed_experts
    np.testing.assert_array_equal(reported(rest.choices[0].routed_experts), reported(choice.routed_experts)[4:])


async def test_update_with_recomputed_cache_keeps_the_experts_of_sampled_tokens(gate_and_engine, mixture):
    """The log-prob of a token depends on the experts that sampled it, so an update must not replace these experts."""
    gate, engine = gate_and_engine
    running = asyncio.create_task(engine.complete(request_with(n=1)))
    await asyncio.to_thread(gate.allow, 3)
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    with torch.no_grad():
        for router in (layer.mlp.gate for layer in model.model.layers):
            router.weight.neg_()  # with the new weights, each router prefers the experts that it avoided
    engine.staging()[:] = bytes_of(model)
    swapped = asyncio.create_task(engine.commit(version=1, epoch=0, on_update=OnUpdate.RECOMPUTE_KV))
    await asyncio.sleep(0)  # the engine receives the commit
    gate.open()
    await swapped
    answer = await running
    (choice,) = answer.choices
    (_, before), _ = choice.version_spans or []
    tokens = PROMPT + (choice.token_ids or [])
    np.testing.assert_array_equal(reported(answer.prompt_routed_experts), chosen_by(mixture, tokens)[: len(PROMPT) - 1])
    rows = reported(choice.routed_experts)
    assert rows.shape == (len(choice.token_ids or []), ROUTING.layers, ROUTING.top_k)
    old = chosen_by(mixture, tokens)[len(PROMPT) - 1 : -1]
    np.testing.assert_array_equal(rows[:before], old[:before])
    assert not np.array_equal(np.sort(rows[before:]), np.sort(old[before:]))


def test_engine_of_a_mixture_model_passes_the_conformance_checks_that_concern_experts(options):
    with in_thread(create_app(from_options(options), token=None)) as url:
        results = run(url, only=OF_EXPERTS, timeout_s=PATIENCE_S)
    assert {result.name: result.reason for result in results if result.outcome is not CheckOutcome.PASSED} == {}
