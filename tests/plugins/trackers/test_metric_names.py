"""Each event is converted to the metric names and values that a tracker receives, and the docs list these names."""

import re
from pathlib import Path

from pipelinerl.plugins.trackers.metric_names import (
    ENGINE_METRICS,
    EVALUATION_METRICS,
    PUBLISH_METRICS,
    STEP_METRICS,
    TRAINED,
    HistoryRewind,
    MetricReader,
    MetricRow,
)
from tests.plugins.watch.timeline.events_of_a_run import event, publish

DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "trackers.md"


def _row(reader, made):
    (row,) = reader.read(made)
    assert isinstance(row, MetricRow)
    return row


def test_tracked_metrics_of_a_step_include_engine_metrics_measured_since_the_previous_step():
    reader = MetricReader()
    for tokens in (100.0, 300.0):
        assert list(reader.read(event("engines", 1.0, tokens_per_s=tokens, occupancy=0.5))) == []
    assert list(reader.read(publish(0, 1.5, "u"))) == []
    row = _row(
        reader,
        event(
            "step", 2.0, step=1, reward=0.5, loss=None, orders=[1], wait_s=1.0, step_s=3.0, tokens=800.0,
            mismatch_numerics_p95=0.125, old_mismatch_staleness_p95=0.25, kl_k1=True,
            by_domain={"math": {"accuracy": 0.75}},
        ),
    )  # fmt: skip
    assert (row.step, row.time) == (1, 1.76e9 + 2.0)
    assert row.figures == {
        "reward": 0.5, "perf/wait_s": 1.0, "perf/step_s": 3.0, "batch/tokens": 800.0, TRAINED: 200.0,
        "perf/tokens_per_s": 200.0, "perf/engine_occupancy": 0.5, "perf/update_pause_s": 0.001,
        "perf/publish_s": 0.03, "mismatch/numerics_p95": 0.125, "old_mismatch/staleness_p95": 0.25,
        "domain/math/accuracy": 0.75,
    }  # fmt: skip
    assert _row(reader, event("step", 3.0, step=2, reward=0.5)).figures == {"reward": 0.5}, "each is reported once"


def test_row_of_an_evaluation_has_the_evaluated_version_as_its_step():
    curves = {"pass_at": [{"k": 4, "value": 0.5}], "majority_at": [{"k": 4, "value": 0.375}]}
    row = _row(MetricReader(), event("evaluation", 1.0, model_version=8, name="aime", accuracy=0.25, **curves))
    assert row == MetricRow(
        8, 1.76e9 + 1.0, {"eval/aime/accuracy": 0.25, "eval/aime/pass@4": 0.5, "eval/aime/maj@4": 0.375}
    )


def test_tracker_discards_later_steps_if_the_trainer_restarts_at_an_earlier_version():
    reader = MetricReader()
    list(reader.read(event("step", 1.0, step=9)))
    assert list(reader.read(event("trainer_ready", 2.0, epoch=2, model_version=9))) == []
    assert list(reader.read(event("trainer_ready", 2.0, epoch=3, model_version=5))) == [HistoryRewind(6)]


def test_documentation_lists_exactly_the_tracked_metric_names():
    table = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", DOCUMENT.read_text(), re.MULTILINE)
    named = {**STEP_METRICS, **ENGINE_METRICS, **PUBLISH_METRICS}
    evaluated = {f"evaluation.{name}": f"eval/<set>/{name}" for name in EVALUATION_METRICS}
    prefixed = {
        "evaluation.pass_at": "eval/<set>/pass@<k>", "evaluation.majority_at": "eval/<set>/maj@<k>",
        "by_domain": "domain/<name>/<figure>", "mismatch_<cause>_<figure>": "mismatch/<cause>_<figure>",
        "old_mismatch_<cause>_<figure>": "old_mismatch/<cause>_<figure>", "tokens / (wait_s + step_s)": TRAINED,
    }  # fmt: skip
    code = {name: field for field, name in {**named, **evaluated, **prefixed}.items()}
    assert dict(table) == code
    assert len(table) == len(code)
