"""The conformance kit with a reference model: each fault of the table fails its check, whose report names the cause."""

import shutil
from contextlib import contextmanager
from functools import partial
from itertools import islice

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from inference_contract.conformance import CheckOutcome, reference_checks, run
from inference_contract.conformance.faults import sent_to
from inference_contract.conformance.session import Expected, Session
from inference_contract.weights import OnUpdate
from pipelinerl.engines.http.server import create_app
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.torch import engine as torch_engine
from pipelinerl.engines.torch.engine import load_runner
from pipelinerl.enums import WeightFormat
from pipelinerl.plugins.warmstart.tiny_decoder import DecoderShape, char_tokenizer, random_decoder
from tests.fakes.served import in_thread
from tests.fakes.wrong_weights import FAULTS
from tests.patience import PATIENCE_S
from trainer_contract.types import WeightDType

CONTEXT, LOOPBACK = 96, "127.0.0.1"
#: Faults of parts that only a mixture of experts with an output layer of its own has.
OF_MIXTURES = ("experts are exchanged", "the untied head is the last version's")
CHECKS = [check.__name__ for check in (*reference_checks.LOADED_CHECKS, *reference_checks.UPDATE_CHECKS)]
#: Faults whose test takes no longer than those of other checks, one for each part of the kit.
QUICK = (
    "one tensor was never loaded",
    "q and k are exchanged",
    "the tied head does not follow",
    "label without load",
    "positions are off by one after a preemption",
    "recompute_kv keeps the cache",
    "top-p of the server, policy's log-probs",
    "log-probs before the temperature",
    "another default system prompt",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory, tokenizer = tmp_path_factory.mktemp("model"), char_tokenizer()
    shape = DecoderShape(hidden=32, layers=2, heads=2, intermediate=48, vocab=len(tokenizer), max_positions=CONTEXT)
    random_decoder(shape).save_pretrained(directory)
    tokenizer.save_pretrained(directory, save_jinja_files=False)
    return directory


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    directory, tokenizer = tmp_path_factory.mktemp("mixture"), char_tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), max_position_embeddings=CONTEXT, tie_word_embeddings=False, **sizes, **experts
    )
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory, save_jinja_files=False)
    return directory


@contextmanager
def served(directory, precision, contexts=16):
    """Serve a directory by the torch engine in this precision, with a cache of so many contexts; yield its URL."""
    is_native = precision in tuple(WeightDType)
    options = EngineOptions(
        model_path=directory,
        model_id="m",
        slots=16,
        max_waiting=256,
        context_length=CONTEXT,
        dtype=WeightDType(precision) if is_native else WeightDType.FLOAT32,
        weights=WeightFormat.NATIVE if is_native else WeightFormat(precision),
    )
    with pytest.MonkeyPatch.context() as patch:
        if contexts < options.slots:
            room = load_runner(options).cache_bytes * contexts // options.slots
            patch.setattr(torch_engine, "load_runner", partial(load_runner, cache_bytes=room))
        with in_thread(create_app(torch_engine.from_options(options), token=None)) as url:
            yield url


def checked(model, directory, precision, only):
    """Return the kit's results for the torch engine of `directory`, which should serve `model`."""
    fills = reference_checks.preempted_samples_compute_as_others.__name__ in only
    with served(directory, precision, contexts=4 if fills else 16) as url:
        expected = Expected(model=model, precision=precision, temperature=0.7)
        return run(url, only=only, timeout_s=PATIENCE_S, expected=expected)


@pytest.mark.parametrize(
    "precision", ["float32", *(pytest.param(p, marks=pytest.mark.slow) for p in ("bfloat16", "int8"))]
)
def test_correct_engine_computes_as_the_reference(model, precision):
    results = checked(model, model, precision, CHECKS)
    assert {result.name: result.reason for result in results if result.outcome is not CheckOutcome.PASSED} == {}


def test_row_that_is_evicted_after_an_update_equals_the_reference(model):
    """A cache of four contexts evicts rows, some after the update: from there on, all is the new version's."""
    evicted = 0
    with served(model, "float32", 4) as url, Session(url, token=None, timeout_s=PATIENCE_S, host=LOOPBACK) as session:
        session.expected = Expected(model=model)
        reference = reference_checks.reference_of(session)
        before, due = reference_checks._two_versions(session, reference)
        for rows, ends in reference_checks._crossing(session, before, due, OnUpdate.CONTINUE):
            kept, recomputed = reference.across_update(rows, ends, before, due)
            expected = reference_checks._over_evictions(rows.logprobs, kept, recomputed)
            torch.testing.assert_close(rows.logprobs, expected, atol=1e-4, rtol=0)
            evicted += int(((expected != kept).any(1) & (expected != recomputed).any(1)).sum())
            if evicted:
                return
    pytest.fail("no row was evicted after an update")


def test_faults_are_sent_to_a_correct_engine_and_compared_with_the_reference(model):
    with served(model, "float32") as url, Session(url, token=None, timeout_s=PATIENCE_S, host=LOOPBACK) as session:
        session.expected = Expected(model=model)
        none, stale = islice(sent_to(session), 2)
    assert (none.fault, stale.fault) == ("none", "one tensor is the last version's")
    assert str(none).startswith("not caught") and str(stale).startswith("caught")


@pytest.mark.parametrize("name", QUICK)
def test_fault_fails_its_check_against_the_reference(model, tmp_path, monkeypatch, name):
    result = _of_fault(FAULTS[name], model, tmp_path, monkeypatch, "float32")
    assert result.outcome is CheckOutcome.FAILED, result.reason
    assert name not in CAUSES or CAUSES[name] in result.reason


#: For some faults, the words with which the report must name the cause.
CAUSES = {
    "one tensor was never loaded": "these tensors do not follow an update: model.layers.1.self_attn.o_proj.weight",
    "q and k are exchanged": "model.layers.1.self_attn.k_proj.weight and model.layers.1.self_attn.q_proj.weight are",
    "label without load": "they are those of the weights of the version before",
    "recompute_kv keeps the cache": "they are those over the old version's cache",
    "log-probs before the temperature": "they are log-probs before the temperature",
    "another default system prompt": "token 0 must be",
}


def _of_fault(fault, model, copy, patch, precision):
    shutil.copytree(model, copy, dirs_exist_ok=True)
    if fault.edits_directory is not None:
        fault.edits_directory(copy)
    fault.inject(patch)
    (result,) = checked(model, copy, precision, [fault.caught_by])
    return result


BELOW_ROUNDING = {
    "one tensor times 1.01",
    "one tensor times 1.001",
    "one tensor in a coarser dtype",
    "all weights drift by 1e-3",
    "all weights drift by 1e-4",
    "a buffer is another",
    "arithmetic in bfloat16",
    "positions are off by one after a preemption",  # only tokens after six preemptions show it
}
#: Faults that a precision hides, since their effect is below its rounding, or that it cannot have.
HIDDEN = {
    "float32": {"the scales of int8 weights are stale"},
    "bfloat16": {"the scales of int8 weights are stale", *BELOW_ROUNDING},
    "int8": {"all tensors in a coarser dtype", "commit in the middle of a step", *BELOW_ROUNDING},
}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_caught_at_every_precision(request, tmp_path, monkeypatch, name, precision):
    model = request.getfixturevalue("mixture" if name in OF_MIXTURES else "model")
    result = _of_fault(FAULTS[name], model, tmp_path, monkeypatch, precision)
    print(f"\n{precision:9} {result.outcome.value:12} {name}: {result.reason}")
    assert result.outcome is CheckOutcome.FAILED or name in HIDDEN[precision]
