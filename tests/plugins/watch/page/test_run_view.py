"""The live page's view of a run drops steps undone by a resume, has bounded memory and accepts malformed events."""

import pytest

from pipelinerl.plugins.watch.page.now import estimate, overview
from pipelinerl.plugins.watch.page.run_view import MOST_RECENT, RunView
from tests.observability.synthetic import events


def view(*taken):
    made = RunView()
    for event in taken:
        made.take(event)
    return made


def test_when_a_run_resumes_its_view_drops_the_finished_state_and_the_steps_that_are_repeated():
    made = view(*events(30))
    assert made.state == "finished" and made.step == 30
    assert not made.take({"kind": "run_started", "elapsed_s": 1.0, "run": "tiny", "knobs": {"k": 2}})
    assert made.state == "" and made.engines == {} and made.knobs == {"k": 2}
    assert made.take({"kind": "step", "step": 11, "reward": 0.5, "rollouts": 4})
    assert made.step == 11 and [step["step"] for step in made.recent][-2:] == [10, 11]
    made.take({"kind": "run_failed", "reason": "no engine"})
    assert made.state == "failed"


def test_run_view_shows_an_alarm_until_it_is_cleared_and_the_last_value_of_each_changed_knob():
    alarm = {"kind": "alarm", "alarm": "stale", "domain": "a", "step": 3, "what": "too old"}
    change = {"kind": "knobs", "changes": {"k": 8}, "who": "ann", "step": 4}
    made = view(alarm, change)
    assert overview(made, window=5)["alarms"] == [{"alarm": "stale", "domain": "a", "step": 3, "what": "too old"}]
    assert made.knobs == {"k": 8} and made.marks[-1]["what"] == "k = 8 by ann" and made.knob_log[0]["who"] == "ann"
    made.take(alarm | {"kind": "alarm_cleared"})
    assert overview(made, window=5)["alarms"] == []


def test_drained_engine_is_shown_as_left_and_not_as_lost():
    lost = {"kind": "engine_lost", "url": "http://a:1", "reason": "drained"}
    made = view({"kind": "engine_joined", "url": "http://a:1"}, lost | {"planned": True})
    assert made.engines["http://a:1"]["state"] == "left"
    assert overview(made, window=5)["incidents"] == []
    made.take(lost)
    (incident,) = overview(made, window=5)["incidents"]
    assert made.engines["http://a:1"]["state"] == "lost" and incident["what"] == "http://a:1: drained"


def test_live_page_counts_stale_groups_by_cause():
    step = {"kind": "step", "step": 1, "by_domain": {"a": {"groups": 6.0, "stale_groups": 3.0, "rollouts": 48.0}}}
    outdated = {"kind": "group_outdated", "order_id": "prompt-1"}
    stale = overview(view(outdated, step, outdated, step | {"step": 2}), window=1)["stale"]
    assert stale["groups"] == 3 and stale["share"] == pytest.approx(1 / 3)
    assert [each["groups"] for each in stale["by_cause"]] == [2.0, 1.0]


def test_confidence_interval_of_a_metric_weights_steps_by_their_number_of_rollouts():
    steps = [{"reward": value, "rollouts": 10.0} for value in (0.0, 1.0)] + [{"reward": 0.5, "rollouts": 0}, {}]
    interval = estimate(steps, "reward")
    assert interval is not None and interval["mean"] == 0.5
    # The bounds are mean ± 1.96 standard errors; two values of equal weight have the error |difference| / 2.
    assert interval["high"] == pytest.approx(0.5 + 1.959964 * 0.5)
    assert estimate(steps[:1], "reward") == {"mean": 0.0, "low": None, "high": None}
    share = estimate([{"accuracy": 0.5, "rollouts": 100.0}], "accuracy", share=True)
    assert share is not None and share["low"] == pytest.approx(0.5 - 1.959964 * 0.05)
    assert estimate([], "reward") is None


def test_run_view_accepts_malformed_events_in_bounded_memory():
    odd = [None, "x" * 100_000, -1, 10**400, [], {}, {"a": {"b": None}}, True]
    kinds = ("step", "publish", "run_started", "knobs", "evaluation", "engines", "alarm", "engine_joined",
             "engine_lost", "run_finished", "group_outdated", "unheard of")  # fmt: skip
    names = ("step", "elapsed_s", "time", "url", "reason", "changes", "knobs", "alarm", "domain", "name", "by_domain",
             "pause_s", "failed", "model_version", "ledger", "who", "rollouts", "orders")  # fmt: skip
    made = RunView()
    for kind in kinds:
        for value in odd:
            made.take({"kind": kind, **dict.fromkeys(names, value)})
            overview(made, window=20)
    for number in range(3 * MOST_RECENT):
        made.take({"kind": "engine_lost", "url": f"http://{number}", "reason": "y" * 10_000})
        made.take({"kind": "step", "step": number + 1, "reward": 1.0})
    assert len(made.recent) == MOST_RECENT and len(made.engines) <= 1024 and len(made.marks) <= 2000
    assert all(len(mark["what"]) <= 500 for mark in made.marks)
