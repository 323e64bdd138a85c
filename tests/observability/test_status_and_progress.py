"""A run's status as JSON, and its display on a terminal and in a pipe."""

import io
import re

import msgspec
import pytest
from rich.console import Console

from pipelinerl.observability.progress import ProgressDisplay, domain_lines, incident_lines, line, render
from pipelinerl.observability.status import (
    ActorStatus,
    EngineStatus,
    EvaluatingStatus,
    FleetStatus,
    HeldOutStatus,
    IncidentStatus,
    LastStepStatus,
    LedgerStatus,
    PassAtStatus,
    RunStatus,
    StatusPhase,
    format_duration,
    reward_words,
    unjudged_share,
)

STATUS = RunStatus(
    run="tiny",
    phase=StatusPhase.TRAINING,
    step=120,
    total_steps=300,
    model_version=120,
    epoch=2,
    last_step=LastStepStatus(reward=0.7321, staleness_mean=2.3, staleness_max=5),
    held_out=HeldOutStatus(
        accuracy=0.614, low=0.57, high=0.65, version=100, one_version=True, first=0.18,
        pass_at=(PassAtStatus(k=8, value=0.8, low=0.75, high=0.85),),
    ),
    evaluating=EvaluatingStatus(
        model_version=110, pin="engine", engine="http://127.0.0.1:4124", answered=17, problems=64, discarded=2
    ),
    fleet=FleetStatus(
        engines=(
            EngineStatus(url="http://127.0.0.1:4123", state="healthy", version=120, running=120, waiting=3, slots=128),
            EngineStatus(url="http://127.0.0.1:4124", state="lost"),
        ),
        tokens_per_s=12345.6,
        occupancy=0.93,
        update_pause_s=0.0012,
    ),
    actors=(ActorStatus(name="actor-0", groups_in_flight=32),),
    ledger=LedgerStatus(issued=2000, trained=1900, filtered=30, stale=12, failed=1, in_flight=57),
    knobs={"staleness.k": 8},
    lag="lag 2.3: it costs 3%",
    waiting_for="3 more groups for step 121",
    elapsed_s=222.0,
    eta_s=318.4,
)  # fmt: skip
HEADLINES = ("120/300", "0.732", "61.4%", "5 min 18 s", "2.3", "1.2 ms", "93%", "3 more groups for step 121")


def shown(status, *, width=120, **options):
    """Return the text of the status block on a terminal with `width` columns."""
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(render(status, width=width, **options))
    return console.export_text()


def test_progress_line_shows_the_last_evaluated_version_and_the_running_evaluation():
    text = line(STATUS)
    assert "held-out 61.4% ±4.0%, pass@8 80.0% of v100" in text
    going = "evaluating v110 on http://127.0.0.1:4124: 17/64, 2 answers of other versions discarded"
    assert going in text
    assert going in shown(STATUS)


def test_status_shows_each_further_evaluation_set_with_its_name():
    other = HeldOutStatus(name="aime", accuracy=0.125, low=0.0, high=0.25, version=90, one_version=True, first=0.0625)
    evaluating = msgspec.structs.replace(STATUS.evaluating, sets=("math", "aime"))
    status = msgspec.structs.replace(STATUS, other_sets=(other,), evaluating=evaluating)
    assert RunStatus.from_json(status.to_json()) == status
    text = line(status)
    assert "held-out 61.4% ±4.0%, pass@8 80.0% of v100 · aime 12.5% ±12.5% of v90 · " in text
    assert "evaluating v110 on http://127.0.0.1:4124 (math, aime): 17/64" in text
    assert re.search(r"aime .*12\.5% ±12\.5% of v90.*\(from 6\.2%\)", shown(status))


def test_status_with_unknown_fields_can_be_read():
    status = RunStatus.from_json(b'{"run": "x", "phase": "evaluating", "field_of_tomorrow": [1]}')
    assert status == RunStatus(run="x", phase=StatusPhase.EVALUATING)


@pytest.mark.parametrize("data", [b"", b"[]", b'{"run": 3}', b'{"run": "x", "phase": "dancing"}'])
def test_invalid_status_is_rejected(data):
    with pytest.raises(ValueError, match="expected a run's status as JSON"):
        RunStatus.from_json(data)
    assert RunStatus.from_json(STATUS.to_json()) == STATUS


@pytest.mark.parametrize("width", [8, 16, 24, 50, 80, 120])
def test_status_block_fits_into_its_width_and_shows_the_main_metrics_if_wide_enough(width):
    block = shown(STATUS, width=width, rewards=[0.1, 0.5, 0.7])
    assert max(map(len, block.splitlines())) <= width
    if width >= 50:
        assert all(text in block for text in (*HEADLINES, STATUS.lag) if width > 50 or text != "5 min 18 s"), block


def test_reward_is_shown_with_the_share_of_answers_that_it_leaves_out():
    share = unjudged_share({"a": {"rollouts": 6.0, "unjudged": 0.5}, "b": {"rollouts": 2.0}, "c": {}})
    status = RunStatus(run="r", last_step=LastStepStatus(reward=1.0, unjudged=share))
    assert "reward 1.000 (37.5% unjudged)" in line(status)
    assert unjudged_share({}) is None and reward_words(0.5, 0.0) == "0.500"


def test_terminal_cursor_is_restored_after_an_error():
    out = io.StringIO()
    with (
        pytest.raises(KeyboardInterrupt),
        ProgressDisplay(Console(file=out, force_terminal=True, width=110)) as progress,
    ):
        progress.show(STATUS)
        raise KeyboardInterrupt
    assert all(text in out.getvalue() for text in ("tiny", "training", "━", "3 min 42 s"))
    assert "\x1b[?25h" in out.getvalue(), "the escape sequence that shows the cursor again"


def test_piped_output_gets_a_status_line_at_intervals_and_when_an_alarm_or_the_phase_of_the_run_changes():
    out, now = io.StringIO(), [0.0]
    with ProgressDisplay(Console(file=out, width=40), line_every_s=5.0, clock=lambda: now[0]) as progress:
        for _ in range(30):
            progress.show(STATUS)
            now[0] += 1.0
        for alarms in (("too long",), ("too long",), ()):
            progress.show(msgspec.structs.replace(STATUS, alarms=alarms))
        progress.show(RunStatus(run="tiny", phase=StatusPhase.FINISHED, held_out=HeldOutStatus(accuracy=0.614)))
    lines = out.getvalue().splitlines()
    assert ["ALARM" in each for each in lines] == [False] * 6 + [True, False, False]
    assert lines[0].startswith("[tiny] training 120/300 · ")
    assert all(text in lines[0] for text in HEADLINES)
    assert "\x1b" not in out.getvalue()
    assert "finished" in lines[-1]


def test_escape_sequences_in_a_status_have_no_effect_on_a_terminal():
    state = RunStatus(run="a", alarms=("\x1b[2J gone",), waiting_for="\x1b]0;title\x07")
    assert "\x1b" not in line(state) and "\\x1b[2J gone" in line(state)
    block = shown(state)
    assert "\x1b" not in block and "\\x1b]0;title" in block


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (4.21, "4.2 s"), (59.4, "59 s"), (185, "3 min 05 s"), (3599.9, "1 h 00 min"), (7810, "2 h 10 min")],
)
def test_durations_are_displayed_with_at_most_two_units(seconds, text):
    assert format_duration(seconds) == text


def test_status_shows_the_metrics_and_alarms_of_each_domain():
    figures = {"reward": 0.5, "reward.format": 0.25, "accuracy": 0.4, "length_mean": 12.34, "truncated": 0.3}
    verified = {"stale": 0.0, "verifier_s": 0.002, "verifier_errors": 3.0}
    by = {"by_domain": {"words": figures | verified, "sums": {"stale": 1.0}}, "by_tag": {"level=3": {"reward": 0.125}}}
    step = LastStepStatus(reward=0.5, entropy=0.456, exact_entropy=0.512, length_mean=12.34, truncated=0.3, **by)
    status = msgspec.structs.replace(STATUS, last_step=step, alarms=("30% of the answers of words are cut",))
    block = shown(status)
    for text in ("0.456, exact 0.512", "12.3 tokens, 30% truncated", "words", "right 40%", "alarm 30% of the answers"):
        assert text in block
    words, sums, level = domain_lines(status)
    assert words.startswith("words: reward 0.500 · right 40% · tokens 12.3 · truncated 30% · stale 0%")
    assert "verifier 2.0 ms, 3 errors" in words and words.endswith("format 0.250")
    assert (sums, level) == ("sums: stale 100%", "tag level=3: reward 0.125")
    assert "ALARM 30% of the answers of words are cut" in line(status) and "ALARM" not in line(STATUS)
    assert RunStatus.from_json(status.to_json()) == status


def test_incidents_are_lines_with_their_number_duration_and_cause():
    lost = IncidentStatus(kind="engine_lost", what="http://a: no\nanswer", count=2, seconds=41.0, ongoing=True)
    once = IncidentStatus(kind="step_skipped")
    assert incident_lines(RunStatus(run="a", incidents=(lost, once))) == [
        "engine lost, 2 times, 41 s, not over: http://a: no\\nanswer",
        "step skipped",
    ]
