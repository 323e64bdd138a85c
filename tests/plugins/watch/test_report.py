"""The HTML report of a run matches the run's events, needs no external resource, and escapes every text."""

import json
import math
import re
import resource
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from pipelinerl.observability.charts import Chart, Line, svg, ticks
from pipelinerl.observability.run_history import Series, tell
from pipelinerl.observability.summary import outcome, summary, summary_rows
from pipelinerl.plugins.watch.report import (
    DOMAIN_HEAD,
    domain_rows,
    episode_rows,
    group_rows,
    render,
    report_of,
    samples_section,
    update_charts,
    write_report,
)
from tests.observability.groups import answer, group
from tests.observability.synthetic import events
from tests.plugins.watch.page.hostile_run import hostile_run
from tests.plugins.watch.run_files import keep

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """HTML parser that collects elements with their attributes, and fails on tags that are closed in a wrong order."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.seen = []
        self.text = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def _run(tmp_path, made, recipe=""):
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in made))
    if recipe:
        (tmp_path / "recipe.toml").write_text(recipe)
    return tmp_path


def test_report_contains_charts_events_samples_and_recipe_and_loads_no_external_resource(tmp_path):
    made = _run(tmp_path, events(), "[run]\nname = 'tiny'")
    keep(made, [group(1, answer("what it said"))])
    files = write_report(made)
    assert files.picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert files.picture.stat().st_size > 20_000
    html = files.html.read_text()
    page = Page(html)
    text = " ".join(page.text)
    for part in ("all steps taken", "300", "staleness.k = 16", "lag 2.0: it costs 3%", "engine lost",
                 "checkpoints/step-300", 'name = "tiny"', "what it said"):  # fmt: skip
        assert part in text, part
    assert sum(tag == "svg" for tag, _ in page.seen) >= 12
    assert "decision" not in text, "the number of a decision is left out"
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.seen}
    assert not [attributes for _, attributes in page.seen if {"src", "href", "xlink:href"} & attributes.keys()]
    assert not re.search(r"url\(|@import|javascript:", html)
    assert "prefers-color-scheme: dark" in html and "width=device-width" in html


def test_report_without_matplotlib_lacks_the_picture_and_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report_of(_run(tmp_path, events(20))) == [tmp_path / "report.html"]
    assert (tmp_path / "report.html").stat().st_size
    assert "needs matplotlib, which is not installed; pip install -e '.[report]'" in capsys.readouterr().err


def test_failed_write_of_a_report_keeps_the_earlier_report(tmp_path):
    files = write_report(_run(tmp_path, events(20)))
    before = files.html.read_bytes(), files.picture.read_bytes()
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, allowed[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_report(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    assert (files.html.read_bytes(), files.picture.read_bytes()) == before
    assert not list(tmp_path.glob(".new-*"))


def test_report_escapes_every_text_of_a_hostile_run(tmp_path):
    html = write_report(hostile_run(tmp_path / "run")).html.read_text()
    page = Page(html)
    tags = {tag for tag, _ in page.seen}
    assert not tags & {"script", "img", "iframe", "object", "link", "math", "a", "input", "base", "textarea"}
    assert not [name for _, attributes in page.seen for name in attributes if name.startswith("on")]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]", html)
    assert "<script>pwned(0)</script>" in "".join(page.text), "the escaped text stays readable"


@pytest.mark.parametrize(
    "made",
    [
        [],
        [{"kind": "run_started", "run": "x", "elapsed_s": 0.0}],
        events(1),
        events(1)[:3],
        [{"kind": "step", "step": 1, "reward": None, "elapsed_s": 1.0}],
        [{"kind": "evaluation", "model_version": 0, "accuracy": 0.0, "elapsed_s": 1.0}],
        [{"kind": "evaluation", "model_version": 0, "accuracy": None, "low": None, "high": None, "elapsed_s": 1.0}],
    ],
    ids=["no events", "started", "one step", "one evaluation", "no reward", "no interval", "no answer"],
)
def test_report_can_be_written_for_a_run_with_few_events(tmp_path, made):
    files = write_report(_run(tmp_path, made))
    Page(files.html.read_text())
    assert files.picture.exists()


def test_report_of_a_resumed_run_counts_each_step_once():
    made = [
        {"kind": "run_started", "run": "r", "elapsed_s": 0.0},
        *({"kind": "step", "step": s, "reward": 0.0, "sampled_tokens": 5, "elapsed_s": float(s)} for s in (1, 2, 3)),
        {"kind": "run_finished", "reason": "stopped", "elapsed_s": 3.5},
        {"kind": "run_started", "run": "r", "elapsed_s": 3.6},
        *({"kind": "step", "step": s, "reward": 1.0, "sampled_tokens": 5, "elapsed_s": s + 2.0} for s in (2, 3, 4)),
    ]
    history = tell(made)
    assert [event["step"] for event in history.steps] == [1, 2, 3, 4]
    assert history.by_step("reward").y == (0.0, 1.0, 1.0, 1.0)
    assert history.sampled_tokens == 20
    assert history.finished is None
    assert outcome(history) == "not finished"
    assert history.duration_s == 6.0


def test_report_summary_shows_accuracy_steps_and_tokens():
    history = tell(events())
    rows = dict(summary_rows(history))
    assert rows["outcome"] == "all steps taken"
    assert re.fullmatch(r"\d\.\d% → 9\d\.\d% \(95 %: .* to .*\) on 512 problems", rows["held-out accuracy"])
    assert rows["steps"].startswith("300 in 4 min ")
    assert rows["tokens sampled"].startswith("2,460,000, ")
    console = Console(width=100, record=True)
    console.print(summary(history, run_dir=Path("runs/tiny"), report=Path("runs/tiny/report.html")))
    assert "runs/tiny/report.html" in console.export_text()


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0, 7, [0, 2, 4, 6, 8]), (-3, 12, [-5, 0, 5, 10, 15]), (0, 0, [0, 0.2])],
)
def test_chart_ticks_are_round_and_cover_the_range(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)
    for most in (1e-9, 3.7e-6, 17.0, 123456.0, 8e12):
        positions = ticks(0.0, most)
        assert positions[0] <= 0 and positions[-1] >= most * (1 - 1e-6) and 3 <= len(positions) <= 8


def test_chart_of_a_long_series_shows_its_spikes_with_few_points():
    xs = tuple(map(float, range(100_000)))
    ys = tuple(1000.0 if x == 54_321 else math.sin(x) for x in xs)
    drawn = svg(Chart(lines=(Line(series=Series(xs, ys)),), x_label="step"))
    assert len(drawn) < 20_000
    top = min(float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", drawn))
    assert top == pytest.approx(12.0, abs=0.1)  # the spike reaches the frame's upper edge


def test_report_shows_the_model_version_and_pass_at_k_of_each_evaluation():
    text = " ".join(Page(render(tell(events(24)), "")).text)
    for part in ("v24 alone, on http://127.0.0.1:4001", "512 × 4", "pass@k, held out", "pass@4",
                 "2 answers of other versions discarded; the trainer took 3 steps meanwhile"):  # fmt: skip
        assert part in text, part
    assert dict(summary_rows(tell(events(24))))["last evaluation"].startswith("pass@1 ")


def test_report_shows_the_last_evaluation_by_domain_and_tag():
    math = {"problems": 9, "accuracy": 0.5, "low": 0.25, "high": 0.75, "length_mean": 20.4, "length_p95": 64.0}
    math |= {"truncated": 0.125, "pass_at": [{"k": 4, "value": 0.75, "low": 0.5, "high": 1.0, "problems": 9}]}
    math |= {"majority_at": [{"k": 4, "value": 0.625, "low": 0.5, "high": 1.0, "problems": 9}]}
    code = {"problems": 0, "accuracy": None, "low": None, "high": None, "truncated": None}
    last = {"kind": "evaluation", "time": 1.0, "elapsed_s": 1.0, "model_version": 3, "accuracy": 0.5}
    last |= {"by_domain": {"code": code, "math": math}, "by_tag": {"level=<1>": code}}
    history = tell([last])
    assert group_rows(history.evaluations) == [
        ("domain code", "0", "–", "", "", "", ""),
        ("domain math", "9", "50.0%", "25.0% to 75.0%", "@4 75.0% (50.0% to 100.0%), maj@4 62.5% (50.0% to 100.0%)",
         "20, P95 64", "12.5%"),
        ("tag level=<1>", "0", "–", "", "", "", ""),
    ]  # fmt: skip
    assert "tag level=<1>" in " ".join(Page(render(history, "")).text)


def of_two_sets():
    """Return a run's events with a second evaluation set, evaluated at the first set's steps and at one more step."""
    made = events(24)
    first = [event | {"name": "math", "place": 0} for event in made if event["kind"] == "evaluation"]
    low = {"accuracy": 0.125, "low": 0.0625, "high": 0.25, "problems": 30, "pass_at": []}
    second = [event | low | {"name": "<aime>", "place": 1} for event in first[::2]]
    between = second[-1] | {"model_version": 23, "accuracy": 0.375}
    return [event for event in made if event["kind"] != "evaluation"] + [*second, between, *first]


def test_report_lists_each_evaluation_set_separately_in_the_order_of_the_recipe():
    history = tell(of_two_sets())
    assert list(history.evaluation_sets) == ["math", "<aime>"]
    assert {event["name"] for event in history.evaluations} == {"math"}
    edited = tell([*of_two_sets(), of_two_sets()[-1] | {"name": "new", "model_version": 25, "place": 0}])
    assert list(edited.evaluation_sets) == ["new", "math", "<aime>"], "the first set of the current recipe comes first"
    alone = tell([event for event in of_two_sets() if event.get("name") != "<aime>"])
    assert (history.first_accuracy, history.last_evaluation) == (alone.first_accuracy, alone.last_evaluation)
    assert history.other_accuracies == [("<aime>", 0.125, 0.125)], "first and last accuracy"
    page = render(history, "")
    text = " ".join(Page(page).text)
    assert "Held-out accuracy by set" in text and "pass@k, math" in text and "pass@k, <aime>" not in text
    assert page.count("<h3>&lt;aime&gt;</h3>") == 1 and "6.2% to 25.0%" in text
    rows = dict(summary_rows(history))
    assert rows["<aime>"] == "12.5% → 12.5%"
    assert "Held-out accuracy by set" not in " ".join(Page(render(alone, "")).text), "a single set has no own chart"


def step(number, *updates):
    event = {"kind": "step", "time": 0.0, "elapsed_s": float(number), "step": number}
    return event | ({"updates": list(updates), "optimizer_steps": float(len(updates))} if updates else {})


def test_optimizer_steps_are_charted_at_fractions_of_their_training_step():
    events = [
        step(1, {"kl_old": 0.0, "clip_fraction": 0.1}, {"kl_old": 0.5, "clip_fraction": 0.2}),
        step(2, {"clip_fraction": 0.3}),
    ]
    kl, clipped, made = [chart.lines[0].series for chart in update_charts(tell(events))]
    assert (kl.x, kl.y) == ((0.5, 1.0), (0.0, 0.5))
    assert (clipped.x, clipped.y) == ((0.5, 1.0, 2.0), (0.1, 0.2, 0.3))
    assert made.y == (2.0, 1.0)
    assert not any(line.series for chart in update_charts(tell([step(1), step(2)])) for line in chart.lines)


def history(*steps):
    return tell([{"kind": "step", "step": number, "elapsed_s": 1.0, **step} for number, step in enumerate(steps, 1)])


def test_domain_means_in_the_report_weight_each_step_by_its_number_of_rollouts():
    words = {"rollouts": 30, "reward": 1.0, "reward.format": 0.5, "accuracy": 1.0, "groups": 3, "stale_groups": 1}
    seldom = {"rollouts": 10, "reward": 0.0, "accuracy": 0.0, "groups": 4, "stale_groups": 0, "verifier_s": 0.004,
              "verified": 10, "verifier_errors": 2}  # fmt: skip
    made = history(
        {"by_domain": {"words": words}}, {"by_domain": {"words": seldom, "<sums>": {}}, "by_tag": {"t": words}}
    )
    rows = {row[0]: dict(zip(DOMAIN_HEAD, row, strict=True)) for row in domain_rows(made)}
    assert list(rows) == ["<sums>", "words", "t"]
    assert rows["words"] | {
        "rollouts": "40", "reward": "0.750, format 0.500", "right": "75.0%", "stale": "12.5%",
        "verifier": "4 ms, 2 errors"
    } == rows["words"]  # fmt: skip
    assert rows["<sums>"]["reward"] == "–" and rows["<sums>"]["stale"] == "–"
    assert "&lt;sums&gt;" in render(made, "") and "<sums>" not in render(made, "")


def test_report_of_episodes_has_a_row_per_domain_with_the_counts_of_tool_calls():
    game = {"turns": 2.0, "segments": 1.5, "rollouts": 10, "episodes": 4, "environment_s": 0.5, "calls_parsed": 3}
    later = game | {"turns": 4.0, "tool_errors": 2, "calls_malformed": 1, "episodes": 12, "environment_s": 1.5}
    steps = ({"by_domain": {"game": game, "sums": {"rollouts": 5}}}, {"by_domain": {"game": later}})
    assert episode_rows(history(*steps)) == [("game", "3", "1.5", "1.25", "6", "2", "1")]
    assert "seconds outside the model" in render(history(*steps), "")
    assert "seconds outside the model" not in render(history({"by_domain": {"sums": {"rollouts": 5}}}), "")


def test_report_shows_the_best_and_worst_samples_of_the_last_steps():
    assert len(samples_section([group(1, answer("<" * 10**6), prompt="&" * 10**6)])) < 60_000
    made = [group(step, answer(f"good {step}", reward=1.0), answer(f"bad {step}", reward=0.0)) for step in range(1, 21)]
    text = "".join(Page(samples_section(made)).text)
    assert "Best of the last steps" in text and "Worst of the last steps" in text
    assert "good 20" in text and "bad 20" in text and "good 15" not in text
