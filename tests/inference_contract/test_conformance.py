"""Tests of the conformance kit for engines: a correct engine passes; each faulty one fails the check for its fault."""

import pytest

from inference_contract.conformance import CHECKS, CheckOutcome, reference_checks, run, select
from pipelinerl.engines.http.server import create_app
from pipelinerl.engines.weights.weight_receiver import WeightReceiver
from tests.fakes.scripted_engine import ScriptedEngine, application
from tests.fakes.scripted_faults import Fault
from tests.fakes.served import in_thread
from tests.patience import PATIENCE_S

#: For each fault of a simulated engine, the check that must fail.
CAUGHT_BY = {
    Fault.ACCEPTS_OLDER: "older_version_is_refused",
    Fault.ACCEPTS_ANY_LAYOUT: "wrong_layout_is_refused",
    Fault.IGNORES_DIGEST: "wrong_digest_is_refused",
    Fault.IGNORES_WEIGHTS: "update_is_served",
    Fault.SERVES_STAGED: "wrong_digest_is_refused",
    Fault.LOWER_GENERATION: "lower_generation_is_refused",
    Fault.LEAVES_FOR_ANY_JOIN: "join_fails_when_rendezvous_closes",
    Fault.REPREPARES: "prepare_is_idempotent",
    Fault.ONE_SPAN: "update_during_whole_answer",
    Fault.NEWEST_SPAN: "update_during_whole_answer",
    Fault.SHORT_SPANS: "columns_match_tokens",
    Fault.POSITIVE_LOGPROBS: "columns_match_tokens",
    Fault.RAW_LOGPROBS: "top_k_one_is_certain",
    Fault.IGNORES_SEED: "same_seed_same_samples",
    Fault.NOISE_BY_BATCH: "noise_is_per_sample",
    Fault.STREAM_DIFFERS: "stream_equals_whole",
    Fault.STREAMS_STOP_STRING: "stream_equals_whole_with_stop",
    Fault.RETOKENIZES: "prompt_ids_are_returned_unchanged",
    Fault.DROPS_UNKNOWN_FIELDS: "unknown_field_is_refused",
    Fault.CLAMPS_TOP_K: "out_of_range_is_refused",
    Fault.FAILS_AT_LARGE_TOP_K: "extreme_values_are_served_or_refused",
    Fault.TRUNCATES_PROMPT: "too_long_prompt_is_refused",
    Fault.COUNTS_NOTHING: "metrics_count_tokens",
    Fault.PULLS_WITHOUT_TOKEN: "pull_is_served",
    Fault.PULLS_ELSEWHERE: "pull_and_broadcast_take_turns",
    Fault.PULLS_FROM_FIRST_ONLY: "pull_tries_the_next_source",
    Fault.PULLS_FIRST_SHARD: "pull_of_shards_is_served",
    Fault.PULLS_WRONG_BYTES: "pull_with_wrong_bytes_is_refused",
    Fault.SERVES_HALF_A_PULL: "broken_pull_leaves_old_weights",
    Fault.COMMITS_ON_ABORT: "aborted_pull_leaves_old_weights",
    Fault.IGNORES_DRAIN: "drain_finishes_running_samples",
    Fault.NEVER_FREES: "disconnect_frees_a_stream",
    Fault.SPELLS_TOKENS: "messages_cannot_inject_control_tokens",
    Fault.OPENS_TEMPLATE: "request_cannot_replace_the_template",
    Fault.REFUSES_DEFAULTS: "default_fields_are_accepted",
    Fault.FORGETS_PREFIX: "greedy_answer_continues",
    Fault.REPEATS_PREFIX: "greedy_answer_continues",
    Fault.RESTARTS_NOISE: "sampled_answer_continues",
    Fault.RENUMBERS_SAMPLES: "sampled_answer_continues",
    Fault.COUNTS_LIMIT_ANEW: "prefix_counts_towards_max_tokens",
    Fault.STOPS_IN_NEW_TEXT_ONLY: "stop_string_may_span_the_prefix",
    Fault.TAKES_ENDED_PREFIX: "ended_prefix_is_refused",
    Fault.WRAPS_UNKNOWN_PREFIX: "unknown_prefix_is_refused",
    Fault.IGNORES_INTERVAL: "fewer_chunks_give_the_same_answer",
    Fault.REINTERPRETS: "converted_dtype_is_served",
    Fault.HEEDS_EOS: "eos_is_ignored",
    Fault.FORGETS_ROUTING: "routed_experts_are_returned_or_refused",
    Fault.SHIFTS_PROMPT_LOGPROBS: "prompt_logprobs_are_returned_or_refused",
    Fault.SCORES_AT_ONE: "prompt_logprobs_are_returned_or_refused",
    Fault.DROPS_TOOLS: "tools_are_rendered_or_refused",
    Fault.DROPS_TOOL_RESULTS: "tool_results_are_rendered_or_refused",
    Fault.ANSWERS_FREELY: "response_format_is_enforced_or_refused",
    Fault.RAW_TOP_LOGPROBS: "top_logprobs_are_returned_or_refused",
    Fault.IGNORES_MIN_P: "min_p_is_applied_or_refused",
    Fault.IGNORES_POLICY_LOGPROBS: "policy_logprobs_are_returned_or_refused",
    Fault.KEEPS_EVERY_TOKEN: "policy_logprobs_are_returned_or_refused",
    Fault.IGNORES_BIAS: "logit_bias_is_applied_or_refused",
    Fault.COUNTS_NO_REPEATS: "penalties_are_applied_or_refused",
    Fault.WANTS_WHOLE_NAME: "short_model_name_is_accepted",
    Fault.IGNORES_TEXT: "completions_route_is_served_or_absent",
    Fault.RENDERS_ANEW: "conversation_continues_exactly",
    Fault.SAMPLES_AFTER_KNOWN: "conversation_continues_exactly",
    Fault.FORGETS_END_OF_TURN: "tail_is_that_of_the_full_rendering",
    Fault.TAKES_HALF_A_CONTINUATION: "bad_continuations_are_refused",
    Fault.WRAPS_CONTINUED_TOKENS: "bad_continuations_are_refused",
    Fault.LEAVES_CALLS_IN_TEXT: "calls_are_parsed_or_refused",
    Fault.STOPS_AFTER_CALLS: "calls_are_parsed_or_refused",
    Fault.DROPS_STREAMED_CALLS: "calls_are_parsed_or_refused",
    Fault.CALLS_UNOFFERED: "calls_are_parsed_or_refused",
    Fault.ENDS_TURNS_TWICE: "tool_results_continue_calls_or_are_refused",
}

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


@pytest.mark.parametrize(("fault", "check"), [*CAUGHT_BY.items(), *ALSO_CAUGHT_BY])
def test_faulty_engine_fails_the_conformance_check_for_its_fault(fault, check):
    with in_thread(application(fault, token="secret")) as url:
        results = run(url, token="secret", only=[check], timeout_s=3.0)
    assert [result.outcome for result in results] == [CheckOutcome.FAILED], f"{fault} must fail {check}: {results}"


def test_every_simulated_engine_fault_has_a_conformance_check():
    assert set(CAUGHT_BY) == set(Fault) - {Fault.NONE}


def test_conformance_check_reports_unsupported_for_an_engine_that_cannot_pull_weights():
    engine = ScriptedEngine()
    app = create_app(engine, token=None)
    with in_thread(app) as url:
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
