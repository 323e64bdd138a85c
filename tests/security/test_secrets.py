"""Where a recipe's password goes, and where it does not: only what its owner alone may read has it."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest

from pipelinerl.config.recipe import load, parse, save, to_table
from pipelinerl.errors import RecipeError, UserError
from pipelinerl.observability.events import EventLog
from pipelinerl.observability.logs import configure
from pipelinerl.observability.report import write_report
from pipelinerl.roles.process import Identity
from pipelinerl.streams.open_stream import open_stream

PASSWORD = "hunter2"
URLS = [
    f"redis://:{PASSWORD}@db.lab:6379/0",
    f"redis://user:{PASSWORD}@db.lab",
    f"redis://db.lab?password={PASSWORD}&db=1",
    f"rediss://db.lab/0?db=1&username=u&password={PASSWORD}",
]


@pytest.mark.parametrize("url", URLS)
def test_a_report_that_everybody_may_read_has_no_password(url: str, tmp_path: Path) -> None:
    save(load("tiny", [f"streams.redis_url={url}"]), tmp_path / "recipe.toml")
    with EventLog(tmp_path / "events.jsonl") as events:
        events.write("run_started", elapsed_s=0.0, run="tiny", knobs={})
        events.write("engine_unreachable", elapsed_s=1.0, reason=f"no answer from {url}")
    page = write_report(tmp_path).html.read_text()
    assert PASSWORD not in page and "db.lab" in page


@pytest.mark.parametrize("url", URLS)
def test_a_configuration_shows_it_to_nobody_and_saves_it_for_its_owner(url: str, tmp_path: Path) -> None:
    config = load("tiny", [f"streams.redis_url={url}"])
    identity = Identity(
        config=config, run_dir=tmp_path, name="a", redis_url=url, controller_url="http://c", token="hunter2-token"
    )
    for shown in (repr(config), str(config), config.model_dump_json(), str(to_table(config)), repr(identity)):
        assert PASSWORD not in shown
    path = tmp_path / "recipe.toml"
    save(config, path)
    assert path.stat().st_mode & 0o777 == 0o600
    kept = load(str(path), []).streams.redis_url
    assert kept is not None and kept.get_secret_value() == url


def test_a_refusal_of_an_address_does_not_repeat_it() -> None:
    for wrong in (f"http://:{PASSWORD}@host", [f"redis://:{PASSWORD}@host"], {"url": f"redis://:{PASSWORD}@host"}):
        with pytest.raises(RecipeError) as refused:
            parse({"streams": {"redis_url": wrong}})
        assert PASSWORD not in str(refused.value)


@pytest.mark.parametrize("url", [f"http://u:{PASSWORD}@h", f"redis://127.0.0.1:port/0?password={PASSWORD}"])
async def test_a_server_that_does_not_answer_is_named_without_it(url: str) -> None:
    with pytest.raises(UserError) as refused:
        await open_stream(url, namespace="x")
    assert PASSWORD not in str(refused.value)


def test_a_log_has_none_whoever_wrote_the_line() -> None:
    before, said = logging.getLogger().handlers[:], io.StringIO()
    try:
        configure(run="r", role="x", stream=said)
        logging.getLogger("redis.connection").error("cannot reach %s", URLS[0])
        try:
            raise ConnectionError(f"gone: {URLS[1]}")
        except ConnectionError:
            logging.getLogger("pipelinerl").exception("ended")
    finally:
        logging.getLogger().handlers[:] = before
    assert said.getvalue().count("db.lab") == 2 and PASSWORD not in said.getvalue()
