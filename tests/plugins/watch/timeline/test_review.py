"""The review of a run's log-prob mismatch metrics matches manual values, and each rule advises when it should."""

import re
import tomllib

import pytest

from pipelinerl.numerics.causes import Cause
from pipelinerl.objective.presets import resolve
from pipelinerl.observability.run_history import tell
from pipelinerl.plugins.watch.timeline.review import FIGURES, advise, review

QUIET = dict.fromkeys(FIGURES, 0.0) | {"ess": 1.0}


def step(number, ages=None, ess=1.0, **causes):
    """Return a step event; `causes` maps each mismatch cause to its metrics; metrics that are not given are 0."""
    event = {"kind": "step", "step": number, "ess": ess, **(ages or {})}
    for cause, figures in causes.items():
        event[f"mismatch_{cause}_share"] = 1 / len(causes)
        event |= {f"mismatch_{cause}_{name}": value for name, value in (QUIET | figures).items()}
    return event


def reviewed(*steps):
    result = review(tell([{"kind": "run_started", "run": "r"}, *steps]))
    assert result is not None
    return result


def advice_on(**step_fields):
    return advise(reviewed(*(step(number, **step_fields) for number in range(1, 4))))


def test_review_reports_start_middle_end_and_worst_step_of_a_logprob_mismatch_metric():
    values = [float(value) for value in range(1, 21)]
    values[13] = 99.0
    result = reviewed(*(step(n, numerics={"p95": v, "ess": 1 / v}) for n, v in enumerate(values, start=1)))
    p95, ess = result.current[Cause.NUMERICS].figures["p95"], result.current[Cause.NUMERICS].figures["ess"]
    assert (p95.start, p95.middle, p95.end, p95.worst, p95.worst_step) == (1.5, 10.5, 19.5, 99.0, 14)
    assert (ess.worst, ess.worst_step) == (1 / 99, 14), "the worst sample size is the least"
    assert result.steps == 20 and result.current.keys() == {Cause.NUMERICS} and result.old == {}


def test_review_weights_the_clipped_share_of_each_token_age_by_the_number_of_its_tokens():
    result = reviewed(
        step(1, {"age_1_share": 0.5, "age_1_clipped": 0.2, "age_3_4_share": 0.5, "age_3_4_clipped": 1.0}, numerics={}),
        step(2, {"age_1_share": 1.0, "age_1_clipped": 0.5}, numerics={}),
    )
    assert list(result.ages) == ["1", "3_4"]
    assert result.ages["1"] == pytest.approx({"share": 0.75, "clipped": (0.1 + 0.5) / 1.5})
    assert result.ages["3_4"] == pytest.approx({"share": 0.25, "clipped": 1.0})


def test_run_with_mismatch_within_bounds_gets_no_advice():
    assert advice_on(numerics={"p95": 0.009}, staleness={"p95": 0.18}, cache={"p95": 0.1}, ess=0.9) == []


@pytest.mark.parametrize(
    ("fields", "finding", "do"),
    [
        ({"numerics": {"p95": 0.02}}, "own version differ by 0.02 at P95", "head_precision"),
        ({"numerics": {"contradictions": 0.01}}, "1.0% of the responses", "token_ratio"),
        (
            {"truncation": {"p95": 0.1, "mean": 0.04}, "staleness": {"p95": 0.3}, "ess": 0.1},
            "by 0.04 nats on average: they are those of a truncated distribution",
            "sampling.top_p = 1",
        ),
        ({"staleness": {"p95": 0.2}}, "older versions differ by 0.2 at P95", "staleness.k below"),
        ({"cache": {"p95": 0.2}, "numerics": {"p95": 1e-6}}, "keys and values", "recompute_kv"),
        ({"ess": 0.4, "staleness": {}}, "effective sample size is 40%", "lower learning rate"),
        (
            {"staleness": {}, "ages": {"age_5_8_share": 1.0, "age_5_8_clipped": 0.6}},
            "of staleness 5 or more (1 = on policy), 60% are clipped or masked",
            "staleness.k = 4",
        ),
    ],
)
def test_each_mismatch_finding_gets_only_the_advice_for_that_finding(fields, finding, do):
    (only,) = advice_on(**fields)
    assert finding in only.finding and do in only.do and only.because


@pytest.mark.parametrize(("shares", "behind"), [([0.0, 0.0, 0.0, 4.0], 3.0), ([1.02, 0.97, 1.0, 1.01], 0.01)])
def test_review_sums_the_updates_that_were_lost_to_rounding_over_steps(shares, behind):
    result = reviewed(*(step(n, numerics={}) | {"sent_share": share} for n, share in enumerate(shares, start=1)))
    assert result.rounding is not None and result.rounding.behind == pytest.approx(behind)


def test_updates_lost_to_rounding_get_advice_on_dithered_rounding_instead_of_head_precision():
    steps = [step(n, numerics={"p95": 1.0, "k1": -1.0, "k3": 1.0}) | {"sent_share": 0.0} for n in range(1, 6)]
    (only,) = advise(reviewed(*steps))
    assert "updates are lost to rounding: at step 5 engines lacked 5.0 steps" in only.finding
    assert "head_precision" not in only.do and 'weights.rounding = "dithered"' in only.do


def test_advice_is_ordered_by_importance():
    heavy, light = {"p95": 0.3, "mean": 0.1}, {"p95": 0.3, "mean": 0.01}
    assert "older" in advice_on(numerics=light, staleness=heavy)[0].finding
    assert "own version" in advice_on(numerics=heavy, staleness=light)[0].finding


@pytest.mark.parametrize("grad1", [{"kind": "clipped_ratio", "over": "old"}, "logprob"])
def test_objectives_that_the_mismatch_review_suggests_are_valid(grad1):
    """The objective that an advice suggests is written in recipe syntax, so the test can put it into a recipe."""
    (numerics,) = advice_on(numerics={"contradictions": 0.01})
    (staleness,) = advice_on(staleness={"p95": 0.2})
    for advice in (numerics, staleness):
        written = re.search(r"objective\.is_weight = (\{.*?\})", advice.do)
        assert written is not None
        slot = tomllib.loads(f"is_weight = {written[1]}")
        if grad1 == "logprob" or "numerator" in slot["is_weight"]:
            assert resolve({"preset": "grpo", "grad1": grad1, **slot}).is_weight != resolve("grpo").is_weight
    assert numerics.do.count("ppo_tis") == 1 and resolve("ppo_tis") is not None
