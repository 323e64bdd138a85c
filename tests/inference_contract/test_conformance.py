"""Tests of the conformance kit for engines: a correct engine passes; each faulty one fails the check for its fault."""

import pytest

from inference_contract.conformance import CHECKS, CheckOutcome, reference_checks, run, select
from pipelinerl.engines.http.server import create_app
from pipelinerl.engines.weights.weight_receiver import WeightReceiver
from tests.fakes.scripted_engine import ScriptedEngine, application
from tests.fakes.scripted_faults import CAUGHT_BY, Fault
from tests.fakes.served import in_thread
from tests.patience import PATIENCE_S

#: Further checks that must fail for some faults, as pairs (fault, check).
ALSO_CAUGHT_BY = (
    (Fault.ONE_SPAN, "update_in_flight"),
    (Fault.ONE_SPAN, "pull_in_flight"),
    (Fault.NEWEST_SPAN, "pull_in_flight"),
    (Fault.IGNORES_WEIGHTS, "pull_is_served"),
    (Fault.FORGETS_END_OF_TURN, "tool_results_continue_calls_or_are_refused"),
)

#: Checks that need a model directory, which a simulated engine does not have.
AGAINST_REFERENCE = [
    check
    for check in (*reference_checks.LOADED_CHECKS, *reference_checks.UPDATE_CHECKS)
    if check is not reference_checks.cache_equals_a_new_prefill
]


def _not_passed(results):
    return {result.name: result.reason for result in results if result.outcome is not CheckOutcome.PASSED}


def test_correct_engine_passes_every_conformance_check_twice_in_a_row():
    with in_thread(application(token="secret")) as url:
        for _ in range(2):
            results = run(url, token="secret", timeout_s=PATIENCE_S)
            assert len(results) == len(CHECKS)
            unproven = _not_passed(results)
            assert all("no model directory was given" in reason for reason in unproven.values())
            assert unproven.keys() == {check.__name__ for check in AGAINST_REFERENCE}


@pytest.mark.parametrize(
    ("fault", "check"), [*((Fault[name], check) for name, check in CAUGHT_BY.items()), *ALSO_CAUGHT_BY]
)
def test_faulty_engine_fails_the_conformance_check_for_its_fault(fault, check):
    with in_thread(application(fault, token="secret")) as url:
        results = run(url, token="secret", only=[check], timeout_s=3.0)
    assert [result.outcome for result in results] == [CheckOutcome.FAILED], f"{fault} must fail {check}: {results}"


def test_conformance_check_reports_unsupported_for_an_engine_that_cannot_pull_weights():
    engine = ScriptedEngine()
    with in_thread(create_app(engine, token=None)) as url:
        engine._receiver = WeightReceiver(engine)
        (result,) = run(url, only=["pull_is_served"])
    assert result.outcome is CheckOutcome.UNSUPPORTED
    assert "does not offer the transport pull" in result.reason


def test_conformance_checks_of_authentication_report_unsupported_for_an_engine_without_a_token():
    with in_thread(application()) as url:
        (result,) = run(url, only=["other_routes_need_the_token"])
    assert result.outcome is CheckOutcome.UNSUPPORTED
    assert "without a token" in result.reason


def test_unreachable_engine_fails_its_conformance_checks_with_a_reason():
    (result,) = run("http://127.0.0.1:9", only=["health_is_ready"], timeout_s=1.0)
    assert result.outcome is CheckOutcome.FAILED
    assert "ConnectError" in result.reason


def test_every_conformance_check_of_engines_has_a_unique_name_and_a_description():
    assert len({check.__name__ for check in CHECKS}) == len(CHECKS)
    assert all((check.__doc__ or "").strip().endswith(".") for check in CHECKS)


def test_unknown_name_of_a_conformance_check_is_rejected():
    with pytest.raises(ValueError, match="'no_such_check' is not a check"):
        select(["no_such_check"])
