"""`pipelinerl samples` on a run's directory: contents, order, text with control characters, and user errors."""

import json
from threading import Timer

import pytest
from typer.testing import CliRunner

from pipelinerl.cli import app
from pipelinerl.errors import UserError
from pipelinerl.observability.events import EventLog
from pipelinerl.observability.samples import SampleKind, SampleLog
from tests.observability.groups import HOSTILE, answer, group
from tests.plugins.watch.run_files import of_episode


def a_run(path, *groups, over=True):
    log = SampleLog(path / "samples", "training", max_bytes=2**20)
    log.put(lambda: groups)
    log.close()
    with EventLog(path / "events.jsonl") as events:
        events.write("run_started", run="r", elapsed_s=0.0)
        if over:
            events.write("run_finished", reason="all steps taken", elapsed_s=1.0)
    return path


def printed_by(*arguments):
    result = CliRunner().invoke(app, ["samples", *arguments], env={"COLUMNS": "100"})
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


GROUPS = (
    group(1, answer("first", reward=0.25, advantage=-0.5), answer("second", reward=0.75), tags=("easy",)),
    group(2, answer("third", reward=0.5, reason="because", parts=(("format", 1.0),), shaped=0.4, trained=True)),
    group(2, answer("fourth", finish_reason="length"), kind=SampleKind.FILTERED, why="-", filtered={"no signal": 3}),
    group(2, answer("fifth"), kind=SampleKind.EVALUATION),
)


def test_samples_command_shows_all_known_facts_of_a_sample(tmp_path):
    output = printed_by(str(a_run(tmp_path, *GROUPS)), "--step", "2")
    for expected in (
        "step 2 · words · trained · words-2",
        "<|im_start|>user",
        "correct · reward 0.5 (format 1) · shaped 0.4 · 3 tokens, ended by stop · versions v7 × 2, v8 × 1",
        "staleness 2 (1 = on policy) · trained",
        "reason  because",
        "answer  third",
        "1 of 5 answers kept",
    ):
        assert expected in output
    assert "\x1b" not in output, "no colours in a pipe"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ["first", "second", "third"]),
        (["--limit", "1"], ["third"]),
        (["--best", "--limit", "2"], ["second", "third"]),
        (["--tag", "easy", "--worst", "--domain", "words", "--step", "1"], ["first", "second"]),
        (["--filtered", "--truncated"], ["fourth"]),
        (["--evaluation"], ["fifth"]),
    ],
)
def test_options_of_the_samples_command_select_and_order_samples(tmp_path, options, expected):
    run = str(a_run(tmp_path, *GROUPS))
    assert [json.loads(line)["text"] for line in printed_by(run, *options, "--json").splitlines()] == expected
    output = printed_by(run, *options)
    assert sorted(expected, key=output.index) == expected


def test_samples_command_shows_an_episode_turn_by_turn_with_its_segments_as_a_tree(tmp_path):
    output = printed_by(str(a_run(tmp_path, of_episode(1))))
    assert output.partition("   segment")[2].splitlines()[:14] == [
        " 1 · begins a conversation (first)",
        "     turn 1 · main · 4 tokens",
        "       answer  let me look",
        "     turn 2 · main · 3 tokens · reward 1",
        "       context the tool says b",
        "       answer  it is b",
        "   segment 2 · continues turn 1 (forked)",
        "     turn 3 · main · 2 tokens",
        "       context try again",
        "       answer  or c",
        "   segment 3 · begins a conversation (first)",
        "     turn 4 · planner · 2 tokens",
        "       context plan it",
        "       answer  a plan",
    ]


def test_samples_command_escapes_control_characters(tmp_path):
    evil = answer(HOSTILE, reason=HOSTILE, finish_reason=HOSTILE, outcome=HOSTILE, parts=((HOSTILE, 1.0),))
    run = str(a_run(tmp_path, group(1, evil, domain=HOSTILE, tags=("[bold]", HOSTILE), prompt=HOSTILE, why=HOSTILE)))
    for output in (printed_by(run), printed_by(run, "--json")):
        assert not set(output) & set(map(chr, [*range(10), *range(11, 32), 127, 0x202E, 0x2069, 0x200B]))
    assert "<script>alert(1)</script>" in printed_by(run) and "[bold]" in printed_by(run)


def test_samples_command_with_the_follow_option_shows_new_samples_and_ends_with_the_run(tmp_path):
    a_run(tmp_path, GROUPS[0], over=False)

    def go_on():
        a_run(tmp_path, GROUPS[1])

    timer = Timer(0.8, go_on)
    timer.start()
    output = printed_by(str(tmp_path), "--follow", "--json", "--limit", "1")
    timer.join()
    assert [json.loads(line)["text"] for line in output.splitlines()] == ["second", "third"]


def test_samples_command_reports_user_errors_in_one_sentence(tmp_path):
    with pytest.raises(UserError, match="is not a run: it has neither"):
        printed_by(str(tmp_path / "nowhere"))
    run = str(a_run(tmp_path, *GROUPS))
    with pytest.raises(
        UserError, match=r"none of the trained samples .* their steps are 1 to 2, their domains words, "
    ):
        printed_by(run, "--tag", "hard")
    (unreadable := tmp_path / "unreadable" / "samples" / "training-000001.jsonl").mkdir(parents=True)
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        printed_by(str(unreadable.parents[1]))
    with pytest.raises(UserError, match="holds no samples"):
        printed_by(str(a_run(tmp_path / "empty")))
    with pytest.raises(UserError, match="has no evaluation samples; it has trained ones"):
        printed_by(str(a_run(tmp_path / "trained", GROUPS[0])), "--evaluation")
    for wrong in (["--worst", "--best"], ["--follow", "--best"], ["--limit", "0"]):
        assert CliRunner().invoke(app, ["samples", run, *wrong]).exit_code == 2
