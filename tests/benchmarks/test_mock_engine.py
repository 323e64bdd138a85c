"""The mock engines of `bench scale` keep the contract, but for weights; what they answer is a function of the seed."""

from __future__ import annotations

import pytest

from benchmarks.mock_engine import LAYOUT, MockEngine, Pace
from inference_contract.conformance import CHECKS, CheckOutcome, run
from inference_contract.errors import NotPrepared, Overloaded, StaleVersion
from inference_contract.schemas import ChatCompletionRequest
from inference_contract.weights import Transport, UpdatePhase, UpdateStatus, WeightUpdateRequest
from pipelinerl.engines.http.server import create_app
from tests.fakes.served import in_thread
from tests.patience import PATIENCE_S

#: Checks of weights, which a mock has none of, and of OpenAI's further fields, which it does not read.
_LEFT_OUT = ("weight_checks", "pull_checks", "openai_checks")


def test_it_passes_every_check_but_those_of_weights_and_further_fields() -> None:
    checks = [check.__name__ for check in CHECKS if not check.__module__.endswith(_LEFT_OUT)]
    with in_thread(create_app(MockEngine(0, Pace(median_s=0.02)), token="secret")) as url:
        results = run(url, token="secret", only=checks, timeout_s=PATIENCE_S)
    assert len(results) == len(checks) > 30
    assert {each.name: each.reason for each in results if each.outcome is not CheckOutcome.PASSED} == {}


def ask(seed: int, **fields: object) -> ChatCompletionRequest:
    known: dict[str, object] = {"prompt_token_ids": [1, 2], "n": 4, "max_tokens": 8, "return_token_ids": True}
    return ChatCompletionRequest(seed=seed, **(known | fields))


async def test_what_takes_how_long_and_what_is_refused_is_drawn_by_seed() -> None:
    pace = Pace(median_s=4.0, full=0.5)
    assert [pace.seconds(seed) for seed in range(99)] == [pace.seconds(seed) for seed in range(99)]
    assert sorted(pace.seconds(seed) for seed in range(999))[499] == pytest.approx(4.0, rel=0.1)
    refused = [seed for seed in range(200) if pace.refuses(seed, 0)]
    assert 60 < len(refused) < 140 and refused != [seed for seed in range(200) if pace.refuses(seed, 1)]
    seen: list[int] = []
    engine = MockEngine(0, Pace(median_s=0.01, full=1.0), lambda seed, at: seen.append(seed))
    with pytest.raises(Overloaded):
        await engine.complete(ask(5))
    assert seen == [5]


def phase(phase: UpdatePhase, version: int, **fields: object) -> WeightUpdateRequest:
    known: dict[str, object] = {"transport": Transport.PULL, "digest": "d"}
    if phase is UpdatePhase.PREPARE:
        known |= {"sources": ("http://127.0.0.1:1",), "layout_id": LAYOUT.layout_id}
    return WeightUpdateRequest(phase=phase, version=version, epoch=1, **(known | fields))


async def test_an_update_changes_its_version_and_nothing_else() -> None:
    engine = MockEngine(0, Pace(median_s=0.001))
    before = await engine.complete(ask(7))
    with pytest.raises(NotPrepared):
        await engine.request_weight_update(phase(UpdatePhase.COMMIT, 3))
    assert (await engine.request_weight_update(phase(UpdatePhase.PREPARE, 3))).status is UpdateStatus.PREPARED
    assert (await engine.request_weight_update(phase(UpdatePhase.COMMIT, 3))).status is UpdateStatus.COMMITTED
    after = await engine.complete(ask(7))
    assert [each.token_ids for each in after.choices] == [each.token_ids for each in before.choices]
    assert (before.model_version, after.model_version) == (0, 3)
    assert {span[0] for each in after.choices for span in each.version_spans or ()} == {3}
    with pytest.raises(StaleVersion):
        await engine.request_weight_update(phase(UpdatePhase.PREPARE, 2))
