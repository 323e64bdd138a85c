"""Log records are JSON lines without keys and passwords; metrics are served as Prometheus text."""

import io
import json
import logging
import warnings

import pytest

from pipelinerl.observability.logs import (
    HIDDEN,
    configure,
    recipe_without_secrets,
    table_without_secrets,
    without_secrets,
)
from pipelinerl.observability.status import labelled_text, prometheus_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *(
            (f"bad key {key}, see the docs", "bad key [key], see the docs")
            for key in ("sk-proj-abcdefghijklmnop0123", "hf_abcdefghijklmnopqrstuvwx", "ghp_abcdefghijklmnopqrstuvwx",
                        "AKIAABCDEFGHIJKLMNOP", "xoxb-1234567890-abc")
        ),
        ("authorization: Bearer abcdefghijklmnop.qr", "authorization: Bearer [key]"),
        ("redis://user:word@host:1/0", "redis://host:1/0"),
        ("http://host/v1?model=m&api_key=word", "http://host/v1?model=m&"),
        *((text, text) for text in ("step-12 of task-3", "a risk-averse model", "bearer of news", "hf_hub")),
    ],
)  # fmt: skip
def test_keys_and_passwords_in_a_text_are_redacted_and_ordinary_words_are_not(text, shown):
    assert without_secrets(text) == shown


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"password": "word", "user": "ann"}, {"password": HIDDEN, "user": "ann"}),
        (
            {"HF_TOKEN": "t", "apiKey": "k", "x-api-key": "k"},
            dict.fromkeys(("HF_TOKEN", "apiKey", "x-api-key"), HIDDEN),
        ),
        ({"headers": {"Authorization": "Basic x"}}, {"headers": {"Authorization": HIDDEN}}),
        ({"secrets": {"a": ["b", 3, True, ""]}}, {"secrets": {"a": [HIDDEN, HIDDEN, True, ""]}}),
        ({"options": [{"token": 7}]}, {"options": [{"token": HIDDEN}]}),
        ({"command": ["agent", "--api-key", "k", "--n", "3"]}, {"command": ["agent", "--api-key", HIDDEN, "--n", "3"]}),
        ({"command": ["agent", "--token=t"]}, {"command": ["agent", f"--token={HIDDEN}"]}),
        ({"database": "postgres://ann:word@host/db"}, {"database": "postgres://host/db"}),
        ({"max_tokens": 4, "key_variable": "API_KEY"}, {"max_tokens": 4, "key_variable": "API_KEY"}),
    ],
)
def test_secrets_of_a_recipe_are_hidden_by_the_names_of_their_keys(given, shown):
    assert table_without_secrets(given) == shown


def test_text_of_a_recipe_is_shown_with_its_first_comments_and_without_secrets():
    text = '# changed: redis://a:b@host\n[domains.environment_options]\npassword = "word"\nsteps = 3\n'
    assert recipe_without_secrets(text) == (
        f'# changed: redis://host\n[domains.environment_options]\npassword = "{HIDDEN}"\nsteps = 3\n'
    )
    assert recipe_without_secrets('password = "wor') == "(the recipe cannot be read)"


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
