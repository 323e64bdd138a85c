"""Metrics are served as Prometheus text, and log records are written as JSON lines."""

import io
import json
import logging
import warnings

import pytest

from pipelinerl.observability.logs import configure
from pipelinerl.observability.status import labelled_text, prometheus_text


def test_prometheus_text_declares_the_type_of_each_metric_and_escapes_label_values():
    text = labelled_text(
        {"steps_total": {(): 3}, "pause_s": {(("url", 'a"b\\c\n'), ("name", "x")): 0.5, (): 1}, "none": {}},
        prefix="engine",
    )
    assert text == (
        "# TYPE engine_steps_total counter\n"
        "engine_steps_total 3\n"
        "# TYPE engine_pause_s gauge\n"
        'engine_pause_s{url="a\\"b\\\\c\\n",name="x"} 0.5\n'
        "engine_pause_s 1\n"
    )
    assert prometheus_text({"a": 1}, prefix="x") == "# TYPE x_a gauge\nx_a 1\n"


@pytest.fixture
def stream():
    return io.StringIO()


def test_log_line_contains_run_role_step_and_model_version(stream):
    log = configure(run="tiny", role="engine-0", stream=stream)
    logging.getLogger("pipelinerl").info("ready after %d s", 3)
    log.at(step=7, model_version=8)
    log.at(step=9)
    logging.getLogger("third.party").warning("odd", extra={"facts": {"parameter": "w"}})
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first.pop("time") > 1e9
    assert first == {
        "level": "info", "run": "tiny", "role": "engine-0", "step": None, "model_version": None,
        "message": "ready after 3 s",
    }  # fmt: skip
    assert (second["step"], second["model_version"]) == (9, 8)
    assert (second["logger"], second["parameter"]) == ("third.party", "w")


def test_exceptions_and_warnings_are_logged_as_one_line_each(stream):
    configure(run="tiny", role="trainer", stream=stream)
    try:
        raise OSError("disk full")
    except OSError:
        logging.getLogger("pipelinerl").exception("checkpoint failed")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", UserWarning, stacklevel=1)
    error, warning = map(json.loads, stream.getvalue().splitlines())
    assert error["trace"].endswith("OSError: disk full")
    assert warning["logger"] == "py.warnings"


def test_second_logging_configuration_replaces_the_first(stream):
    configure(run="a", role="x", stream=stream)
    configure(run="b", role="x", stream=stream)
    logging.getLogger("pipelinerl").info("once")
    assert [json.loads(line)["run"] for line in stream.getvalue().splitlines()] == ["b"]
