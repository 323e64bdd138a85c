"""`pipelinerl prefilter` computes pass rates, keeps problems whose rate is in a range, and resumes when interrupted."""

import json

import pytest
from rich.console import Console

from pipelinerl.config.recipe import load
from pipelinerl.data.problems import open_source
from pipelinerl.data.source import Split
from pipelinerl.errors import UserError
from pipelinerl.plugins.evaluation.prefilter import ANSWERS, Band, band_of, prefilter
from pipelinerl.plugins.evaluation.respondents import target_of
from tests.fakes.openai_server import OpenAIFake
from tests.fakes.served import in_thread


@pytest.fixture
def config(tmp_path):
    """Return a recipe with forty problems, whose prompts are the numbers from 0 to 39; the right answer is always 7."""
    lines = [json.dumps({"prompt": f"{n}", "answer": "7", "metadata": {"n": n}}) for n in range(40)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    (tmp_path / "recipe_file.toml").write_text(
        '[model]\npath = "shipped:tiny_speller"\n[sampling]\nmax_tokens = 4\n[[domains]]\nname = "sevens"\n'
        f'source = "files"\nparameters = {{ path = {json.dumps(str(tmp_path / "data.jsonl"))} }}\n'
    )
    return load(str(tmp_path / "recipe_file.toml"))


def answers(body):
    """Answer correctly if the prompt ends with 0, wrongly if it ends with 1, and otherwise correctly for odd seeds."""
    last = body["messages"][0]["content"][-1]
    return "7" if last == "0" or (last != "1" and body["seed"] % 2) else "8"


def prefiltered(url, config, out, **changes):
    chosen = {"keep": Band(low=0.1, high=0.9), "problems": 100, "samples": 8} | changes
    return prefilter(target_of(url), config, out=out, token=None, model="", console=Console(quiet=True), **chosen)


def test_prefilter_writes_the_kept_problems_as_a_data_set_with_pass_rates(tmp_path, config):
    out = tmp_path / "out"
    fake = OpenAIFake(answers)
    with in_thread(fake.app) as url:
        report = prefiltered(url, config, out)
        everything = prefiltered(url, config, out, keep=Band())
    assert 20 < report.problems < 40 and len(fake.bodies) == 8 * report.problems, "each training problem once"
    assert (report.unanswered, everything.asked) == (0, 0), "another band needs no answers"
    rows = [json.loads(line) for line in report.files["sevens"].read_text().splitlines()]
    assert len(rows) == everything.problems
    assert len({row["id"] for row in rows}) == len(rows)
    by_number = {row["metadata"]["n"]: row for row in rows}
    assert all(by_number[n]["metadata"]["pass_rate"] == 1.0 for n in by_number if n % 10 == 0)
    assert all(by_number[n]["tags"] == ["pass_rate=0"] for n in by_number if n % 10 == 1)
    assert report.kept["sevens"] < everything.kept["sevens"] == everything.problems
    parameters = {"path": str(report.files["sevens"])}
    source = open_source("files", domain="d", split=Split.TRAIN, seed=0, parameters=parameters)
    read = {source.problem(index).messages[0].content for index in range(200)}
    assert read == {row["messages"][0]["content"] for row in rows}, "no held-out problem is in the data set"
    assert 0 <= source.problem(0).metadata["pass_rate"] <= 1


def test_resumed_prefilter_does_not_sample_problems_again_that_were_already_answered(tmp_path, config):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    fake = OpenAIFake(answers)
    with in_thread(fake.app) as url:
        report = prefiltered(url, config, whole)
        prefiltered(url, config, broken)
        lines = (broken / ANSWERS).read_bytes().splitlines(keepends=True)
        # The first line is a header. The file looks as if the command was killed while it wrote the sixth answer.
        (broken / ANSWERS).write_bytes(b"".join(lines[:6]) + lines[6][:9])
        fake.bodies.clear()
        again = prefiltered(url, config, broken)
    assert (again.asked, len(fake.bodies)) == (report.problems - 5, 8 * (report.problems - 5))
    assert (broken / "sevens.jsonl").read_text() == (whole / "sevens.jsonl").read_text()


@pytest.mark.parametrize("text", ["", "0.1", "0.1-0.9", "0.9..0.1", "-1..1", "0..2", "a..b", "nan..nan"])
def test_invalid_range_of_pass_rates_is_rejected(text):
    with pytest.raises(UserError, match="--keep must be a band of pass rates such as"):
        Band.parse(text)


def test_pass_rate_range_is_parsed_from_text_and_each_pass_rate_gets_the_label_of_its_band():
    assert Band.parse("0.1..0.9") == Band(low=0.1, high=0.9)
    assert [band_of(rate) for rate in (0.0, 0.125, 0.2, 0.5, 0.99, 1.0)] == [
        "0", "0-0.2", "0.2-0.4", "0.4-0.6", "0.8-1", "1",
    ]  # fmt: skip
