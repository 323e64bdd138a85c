"""Every registered engine whose libraries are installed must pass the conformance kit."""

import pytest

from inference_contract.conformance import (
    CheckOutcome,
    conversation_checks,
    openai_checks,
    pull_checks,
    run,
    weight_checks,
)
from inference_contract.conformance.session import Expected
from pipelinerl.component import missing_packages
from pipelinerl.engines.http.server import create_app
from pipelinerl.engines.options import EngineOptions
from pipelinerl.enums import WeightFormat
from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.plugins.parameter_server.download import WeightPuller
from pipelinerl.plugins.warmstart.tiny_decoder import DecoderShape, char_tokenizer, random_decoder
from pipelinerl.registry import ENGINES, load
from tests.fakes.served import in_thread
from tests.fakes.tool_model import save_tool_model
from tests.patience import PATIENCE_S

CONTEXT = 128


def _directory(name, folder):
    tokenizer = char_tokenizer()
    if name == "bigram":
        BigramModel.random(len(tokenizer), seed=1, context_length=CONTEXT).save(folder)
    else:
        shape = DecoderShape(hidden=32, layers=2, heads=2, intermediate=48, vocab=len(tokenizer), max_positions=CONTEXT)
        random_decoder(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    return folder


#: Engines that `external/vllm/test_engine.py` and `external/server/test_stock_servers.py` test instead.
ELSEWHERE = {*ENGINES.having("drives_server"), "vllm"}
INSTALLED = [
    (name, WeightFormat.NATIVE)
    for name, each in ENGINES.items()
    if not missing_packages(each) and name not in ELSEWHERE
]


#: Checks of weight updates. The torch engine must also pass them with int8 weights, which differ in
#: format from the weights of an update.
OF_WEIGHTS = tuple(check.__name__ for check in (*weight_checks.CHECKS, *pull_checks.CHECKS))


@pytest.mark.parametrize("name", [name for name, _ in INSTALLED if name != "bigram"])
def test_engine_with_a_tool_template_continues_conversations_and_parses_tool_calls(name, tmp_path):
    save_tool_model(tmp_path, context_length=512)
    options = EngineOptions(model_path=tmp_path, model_id=name, slots=4, max_waiting=256, context_length=512)
    engine = load("engine", ENGINES, name)(options)
    only = [check.__name__ for check in (*conversation_checks.CHECKS, *openai_checks.CHECKS)]
    with in_thread(create_app(engine, token=None)) as url:
        results = run(url, only=only, timeout_s=PATIENCE_S)
    assert {result.name: result.reason for result in results if result.outcome is not CheckOutcome.PASSED} == {}


@pytest.mark.parametrize(
    ("name", "weights", "only"),
    [
        *((*each, None) for each in INSTALLED),
        ("torch", WeightFormat.INT8, OF_WEIGHTS),
        pytest.param("torch", WeightFormat.INT8, None, marks=pytest.mark.slow),
    ],
    ids=lambda given: "of weights" if given == OF_WEIGHTS else None,
)
def test_registered_engine_passes_the_conformance_kit(name, weights, only, tmp_path):
    options = EngineOptions(
        model_path=_directory(name, tmp_path),
        model_id=name,
        slots=16,
        max_waiting=256,
        context_length=CONTEXT,
        weights=weights,
        pull=WeightPuller(token="secret"),
    )
    engine = load("engine", ENGINES, name)(options)
    expected = Expected(model=tmp_path, precision="float32" if weights is WeightFormat.NATIVE else weights.value)
    with in_thread(create_app(engine, token="secret")) as url:
        results = run(url, token="secret", only=only, timeout_s=PATIENCE_S, expected=expected)
    assert {result.name: result.reason for result in results if not _is_right(name, result)} == {}


def _is_right(engine, result):
    """Return True for a passed check, for what transformers cannot compute, and for a cache with room for all samples.

    `tests/inference_contract/test_faults.py` has an engine whose cache the kit fills.
    """
    is_foreign = engine == "bigram" and "must be a model directory that transformers can load" in result.reason
    unproven = is_foreign or "did not fill the cache" in result.reason
    return result.outcome is CheckOutcome.PASSED or (unproven and result.outcome is CheckOutcome.UNSUPPORTED)
