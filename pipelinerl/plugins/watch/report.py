"""The report of a run: one self-contained HTML file, the learning curve as a PNG, and a summary for the terminal.

These are made from `events.jsonl` and `recipe.toml` in the run's directory, even while the run is live. The page loads
no external resources, works in light and dark mode, on a phone and on paper, and escapes every value.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from string import Template
from typing import Any, Final

import typer

from pipelinerl.errors import UserError
from pipelinerl.observability.charts import Chart, Line, Mark, compact, draw, svg
from pipelinerl.observability.evaluations import (
    GROUPS_HEAD,
    HEAD,
    accuracy_lines,
    evaluation_rows,
    group_rows,
    pass_at_lines,
)
from pipelinerl.observability.events import Event, EventFollower, amount, changes_words, read_events
from pipelinerl.observability.logs import recipe_without_secrets, without_secrets
from pipelinerl.observability.run_history import (
    HELD_OUT,
    OF_SAMPLER,
    RunHistory,
    Series,
    groups_of,
    mean_of,
    placed_by_version,
    stale_share,
    tell,
)
from pipelinerl.observability.samples.reading import ChosenSample, Ranking, SampleQuery, read_samples
from pipelinerl.observability.samples.record import (
    AnswerRecord,
    SampleGroup,
    SampleKind,
    one_line,
    shortened,
    visible,
)
from pipelinerl.observability.status import format_duration
from pipelinerl.observability.summary import outcome, summary_rows
from pipelinerl.roles.role import RunPath

_PAGE = Path(__file__).with_name("report_page.html")


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """Paths of the files of a written report."""

    html: Path
    picture: Path


def report(run_dir: RunPath) -> None:
    """Write learning_curve.png and report.html of a run, live or finished."""
    for path in report_of(run_dir):
        typer.echo(str(path))


def report_of(run_dir: Path) -> list[Path]:
    """Write the report of a run and, with matplotlib, its learning curve; return the files, or raise `UserError`."""
    try:
        if not EventFollower(run_dir / "events.jsonl").new() and (run_dir / "events.jsonl").stat().st_size:
            raise ValueError("no line of it is an event")
        files = write_report(run_dir)
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise UserError(f"{run_dir} has no readable events.jsonl to report on: {error}") from None
    except OSError as error:
        raise UserError(f"the report of {run_dir} cannot be written: {error}") from None
    except ModuleNotFoundError:  # after the page was written
        typer.echo("learning_curve.png needs matplotlib, which is not installed; pip install -e '.[report]'", err=True)
        return [run_dir / "report.html"]
    return [files.html, files.picture]


def write_report(run_dir: Path) -> ReportFiles:
    """Write `report.html` and `learning_curve.png` into the run's directory.

    Raises FileNotFoundError if there is no event log, OSError if the disk is full.
    """
    history = tell(read_events(run_dir / "events.jsonl"))
    recipe = run_dir / "recipe.toml"
    text = recipe_without_secrets(recipe.read_text()) if recipe.is_file() else ""
    page = without_secrets(render(history, text, samples=read_samples(run_dir)))
    files = ReportFiles(run_dir / "report.html", run_dir / "learning_curve.png")
    with _in_place_of(files.html) as draft:
        draft.write_text(page)
    with _in_place_of(files.picture) as draft:
        draw(history, draft)
    return files


@contextmanager
def _in_place_of(path: Path) -> Iterator[Path]:
    """Yield a draft file that replaces `path` once it is complete, so that the earlier file survives a full disk."""
    draft = path.with_name(f".new-{path.name}")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def render(history: RunHistory, recipe: str, *, samples: Sequence[SampleGroup] = ()) -> str:
    """Return the report as an HTML page."""
    return Template(_PAGE.read_text()).substitute(
        run=escape(history.run),
        outcome=escape(outcome(history)),
        state="live" if history.finished is None else "over",
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        tiles="".join(_tile(*tile) for tile in _tiles(history)),
        learning=_learning(history),
        charts="".join(_figure(*figure) for figure in _figures(history)),
        summary=_table(("", ""), summary_rows(history)),
        evaluations=_evaluations(history),
        domains=_domains(history),
        samples=samples_section(samples),
        knobs=_knobs(history),
        incidents=_incidents(history),
        recipe=escape(recipe.strip() or "(no recipe was found)"),
    )


def _tiles(history: RunHistory) -> list[tuple[str, str, str]]:
    tiles = []
    evaluation, first = history.last_evaluation, history.first_accuracy
    if evaluation is not None:
        tiles.append(("held-out accuracy", f"{evaluation['accuracy']:.1%}", _from(first, ".1%")))
        tiles += [(f"pass@{each['k']}", f"{each['value']:.1%}", "held out") for each in evaluation.get("pass_at") or ()]
        for name, first_of, last_of in history.other_accuracies:
            tiles.append((name, f"{last_of:.1%}", _from(first_of, ".1%")))
    if history.last_reward is not None:
        notes = (_from(history.first_reward, ".3f"), f"{history.unjudged:.1%} unjudged" if history.unjudged else "")
        tiles.append(("reward", f"{history.last_reward:.3f}", ", ".join(filter(None, notes))))
    if history.steps:
        tiles.append(("steps", f"{len(history.steps):,}", f"in {format_duration(history.duration_s)}"))
    speed, busy = history.median(history.engines, "tokens_per_s"), history.median(history.engines, "occupancy")
    if speed is not None:
        tiles.append(("tokens/s", compact(speed), "" if busy is None else f"engines {busy:.0%} busy"))
    stale, most = history.median(history.steps, "staleness_mean"), history.max_of(history.steps, "staleness_max")
    if stale is not None and most is not None:
        tiles.append(("staleness", f"{stale:.1f}", f"at most {most:.0f} versions; 1 = on policy"))
    pause, longest = history.median(history.publications, "pause_s"), history.max_of(history.publications, "pause_s")
    if pause is not None and longest is not None:
        tiles.append(("update pause", f"{pause * 1e3:.3g} ms", f"at most {longest * 1e3:.3g} ms"))
    return tiles


def _tile(name: str, value: str, note: str) -> str:
    return f"<div class=tile><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"


def _learning(history: RunHistory) -> str:
    reward = history.by_sampling_version()
    accuracy, low, high = history.accuracy(history.evaluations)
    lines = (
        Line(series=reward, colour=1, mark=Mark.FAINT),
        Line(series=reward.smoothed(), label="reward, training", colour=1),
        Line(series=accuracy, label="held-out accuracy", colour=2, mark=Mark.DOTS, low=low, high=high),
    )
    fits = all(0 <= value <= 1 for line in lines for value in line.series.y)
    y_max = 1.0 if fits else 0.0
    wide = Chart(lines=lines, x_label="model version", width=900, height=330, percent=fits, y_max=y_max)
    narrow = Chart(lines=lines, x_label="model version", width=420, height=300, percent=fits, y_max=y_max)
    return f"{_legend(lines)}<div class=for-wide>{svg(wide)}</div><div class=for-narrow>{svg(narrow)}</div>"


def _chart(title: str, series: Mapping[str, Series], *, x_label: str = "step", **options: Any) -> tuple[str, Chart]:
    """Return the title and a chart that draws each series as a line, labelled by its key; line n has colour n."""
    lines = (Line(series=each, label=label, colour=at) for at, (label, each) in enumerate(series.items(), start=1))
    return title, Chart(lines=tuple(lines), x_label=x_label, **options)


def _figures(history: RunHistory) -> list[tuple[str, Chart]]:
    steps, engines = history.by_step, partial(history.series, history.engines)
    of_share: dict[str, Any] = {"percent": True, "y_max": 1.0}
    update: dict[str, Any] = {"x_label": "model version", "unit": " ms"}
    figures = [
        ("Held-out accuracy by set", Chart(lines=accuracy_lines(history), x_label="step", **of_share)),
        *(
            (
                f"pass@k, {'held out' if name == HELD_OUT else name}",
                Chart(lines=pass_at_lines(events), x_label="step", **of_share),
            )
            for name, events in history.evaluation_sets.items()
        ),
        _chart(
            "Staleness, in versions (1 = on policy)", {"mean": steps("staleness_mean"), "max": steps("staleness_max")}
        ),
        _chart("Tokens sampled per second", {"": engines("tokens_per_s")}, x_label="seconds"),
        _chart("Busy engine slots", {"": engines("occupancy")}, x_label="seconds", **of_share),
        _chart("Update pause, no token decoded", {"": history.update_ms("pause_s")}, **update),
        _chart("Duration of a weight update", {"": history.update_ms("total_s")}, **update),
        _chart("Step time", {"step": steps("step_s"), "waiting for rollouts": steps("wait_s")}, unit=" s"),
        _chart("Gradient norm", {"": steps("grad_norm")}),
        _chart("Loss", {"": steps("loss")}),
        _chart("Learning rate", {"": steps("learning_rate")}),
        _chart("Share of tokens clipped", {"": steps("clip_fraction")}, percent=True),
        *update_charts(history),
        _chart("Effective sample size, of 1", {"": steps("ess")}, **of_share),
        *domain_charts(history),
        _chart("Trainer − sampler, P95 |Δ log-prob|", _by_cause(history, "p95")),
        _chart("Trainer − sampler, max |Δp| of a response", _by_cause(history, "response_max")),
    ]
    changed = tuple((amount(each, "step"), changes_words(each.get("changes"))) for each in history.knobs)
    return [
        (title, replace(chart, marks=changed) if chart.x_label == "step" else chart)
        for title, chart in figures
        if any(line.series for line in chart.lines)
    ]


def update_charts(history: RunHistory) -> list[tuple[str, Chart]]:
    """Return (title, chart) of KL from π_old and clipping, by optimizer step, and of optimizer steps per training step.

    The charts have no data if each training step has one optimizer step.
    """
    kl, clipped = (_by_update(history, name) for name in ("kl_old", "clip_fraction"))
    return [
        _chart("KL from π_old at each optimizer step", {"": kl}, unit=" nats"),
        _chart("Share of tokens clipped at each optimizer step", {"": clipped}, percent=True),
        _chart("Optimizer steps per step", {"": history.by_step("optimizer_steps")}),
    ]


def _by_update(history: RunHistory, name: str) -> Series:
    """Return the metric `name` by optimizer step; optimizer step n of the N in training step v has x = v − 1 + n/N."""
    points = [
        (float(event["step"]) - 1 + number / len(event["updates"]), float(update[name]))
        for event in history.steps
        for number, update in enumerate(event.get("updates", ()), start=1)
        if name in update
    ]
    return Series(tuple(x for x, _ in points), tuple(y for _, y in points))


def _by_cause(history: RunHistory, figure: str) -> dict[str, Series]:
    causes = ("numerics", "staleness", "cache", "truncation")
    return {cause: history.by_step(f"mismatch_{cause}_{figure}") for cause in causes}


def _figure(title: str, chart: Chart) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{_legend(chart.lines)}{svg(chart)}</figure>"


def _legend(lines: tuple[Line, ...]) -> str:
    named = [line for line in lines if line.label and line.series]
    if len(named) < 2:
        return ""
    keys = "".join(f"<span><i class=c{line.colour}></i>{escape(line.label)}</span>" for line in named)
    return f"<div class=legend>{keys}</div>"


def _knobs(history: RunHistory) -> str:
    rows = []
    for event in history.knobs:
        made = changes_words(event.get("changes"))
        rows.append((_when(event), str(event.get("step", "")), made, str(event.get("who", ""))))
    return _table(("time", "step", "changed", "by"), rows) if rows else "<p class=none>No knobs were changed.</p>"


def _evaluations(history: RunHistory) -> str:
    parts = []
    for name, evaluations in history.evaluation_sets.items():
        groups = group_rows(evaluations)
        parts.append(f"<h3>{escape(name)}</h3>" if len(history.evaluation_sets) > 1 else "")
        parts.append(_table(HEAD, evaluation_rows(evaluations)))
        parts.append(_table(GROUPS_HEAD, groups) if len(groups) > 1 else "")
    return "".join(parts) or "<p class=none>Nothing was evaluated.</p>"


def _domains(history: RunHistory) -> str:
    rows, episodes = domain_rows(history), episode_rows(history)
    if not rows:
        return "<p class=none>No step was taken.</p>"
    return _table(DOMAIN_HEAD, rows) + (_table(EPISODE_HEAD, episodes) if episodes else "")


def _incidents(history: RunHistory) -> str:
    rows = []
    for each in history.incidents:
        rest = ", ".join(
            f"{k} {v}"
            for k, v in each.event.items()
            if k not in ("time", "kind", "elapsed_s", "decision") and v is not None
        )
        lasted = format_duration(each.seconds) if each.seconds else ""
        rows.append((_when(each.event), each.kind.replace("_", " "), str(each.count), lasted, rest))
    return _table(("last at", "event", "times", "lasted", "details"), rows) if rows else "<p class=none>None.</p>"


def _when(event: Event) -> str:
    return format_duration(float(event.get("elapsed_s") or 0.0))


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    thead = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
    return f"<div class=scroll><table>{thead}<tbody>{body}</tbody></table></div>"


def _from(first: float | None, form: str) -> str:
    return "" if first is None else f"from {first:{form}}"


#: Number of line colours that the page defines; charts show this many domains, the table shows all.
_COLOURS: Final = 3
_CALLS: Final = ("calls_parsed", "tool_errors", "calls_malformed")
#: Number of last steps over which the table of domains averages.
_STEPS: Final = 10

DOMAIN_HEAD: Final = (
    "last steps",
    "rollouts",
    "reward",
    "right",
    "tokens",
    "P95",
    "truncated",
    "unjudged",
    "all right",
    "all wrong",
    "stale",
    "verifier",
)


EPISODE_HEAD: Final = ("last steps", "turns", "segments", "seconds outside the model", "calls", "failed", "malformed")


def episode_rows(history: RunHistory) -> list[tuple[str, ...]]:
    """Return a row for each domain that has episodes: means per episode and sums of tool calls (`EPISODE_HEAD`)."""
    rows = []
    for name, figures in groups_of(history.steps[-_STEPS:], "by_domain").items():
        if (turns := mean_of(figures, "turns")) is None:
            continue
        segments, seconds = mean_of(figures, "segments"), mean_of(figures, "environment_s", weight="episodes")
        calls = (sum(each.get(kind, 0) for each in figures) for kind in _CALLS)
        means = ("–" if value is None else f"{value:.3g}" for value in (turns, segments, seconds))
        rows.append((one_line(name), *means, *(f"{count:,.0f}" for count in calls)))
    return rows


def domain_rows(history: RunHistory) -> list[tuple[str, ...]]:
    """Return rows by domain, then by tag, with the columns `DOMAIN_HEAD`: means over the last steps' rollouts."""
    groups = [groups_of(history.steps[-_STEPS:], field).items() for field in ("by_domain", "by_tag")]
    return [_row(name, figures) for each in groups for name, figures in each]


def domain_charts(history: RunHistory) -> list[tuple[str, Chart]]:
    """Return (title, chart) for the run's entropy and length, and for metrics of the first `_COLOURS` domains."""
    names, steps = list(groups_of(history.steps, "by_domain"))[:_COLOURS], history.by_step

    def by_domain(figure: str) -> dict[str, Series]:
        return {name: _course(history, name, figure) for name in names}

    reward = {name: series.smoothed() for name, series in by_domain("reward").items()}
    entropies = {"of the sampled tokens": steps("entropy"), "exact": steps("exact_entropy")}
    return [
        _chart("Entropy, nats per token", entropies),
        _chart("Answer length, tokens", {"mean": steps("length_mean"), "P95": steps("length_p95")}),
        _chart("Reward by domain, smoothed", reward, x_label="model version"),
        _chart("Accuracy by domain", by_domain("accuracy"), x_label="model version", percent=True, y_max=1.0),
        _chart("Mean length by domain", by_domain("length_mean")),
        _chart("Share truncated by domain", by_domain("truncated"), percent=True),
        _chart("Share stale by domain", by_domain("stale"), percent=True),
    ]


def _row(name: str, figures: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    def shown(figure: str, form: str) -> str:
        value = mean_of(figures, figure)
        return "–" if value is None else format(value, form)

    parts = sorted({key.removeprefix("reward.") for each in figures for key in each if key.startswith("reward.")})
    reward = [shown("reward", ".3f"), *(f"{one_line(part)} {shown(f'reward.{part}', '.3f')}" for part in parts)]
    stale, seconds = stale_share(figures), mean_of(figures, "verifier_s", weight="verified")
    errors = sum(each.get("verifier_errors", 0) for each in figures)
    verifier = "–" if seconds is None else f"{seconds * 1e3:.3g} ms" + (f", {errors:.0f} errors" if errors else "")
    return (
        one_line(name),
        f"{sum(each.get('rollouts', 0) for each in figures):,.0f}",
        ", ".join(reward),
        shown("accuracy", ".1%"),
        shown("length_mean", ".1f"),
        shown("length_p95", ".1f"),
        *(shown(figure, ".1%") for figure in ("truncated", "unjudged", "all_right", "all_wrong")),
        "–" if stale is None else f"{stale:.1%}",
        verifier,
    )


def _course(history: RunHistory, domain: str, figure: str) -> Series:
    """Return a metric of one domain as a series over the step, or a reward over the version that sampled it."""
    x = "sampled_version" if figure in OF_SAMPLER else "step"
    steps = placed_by_version(history.steps)
    by_step = [(step[x], groups_of([step], "by_domain").get(domain, [])) for step in steps]
    return history.series([{x: at, **each} for at, figures in by_step for each in figures], figure, x=x)


# --- samples: best and worst answers of the last steps, and the worst of the last evaluation --------------------------
#
# Texts of models, verifiers and data sets are untrusted: they are shortened, their invisible characters are shown as
# escapes, and HTML is escaped, in this order. They are placed only in elements that hold text.

#: Number of steps from which the report chooses samples: the last ones that have any.
_SAMPLE_STEPS: Final = 5
_SAMPLES: Final = 4
_SAMPLE_CHARACTERS: Final = 1500


def samples_section(groups: Sequence[SampleGroup]) -> str:
    """Return the HTML of the report's section on samples."""
    trained = _last_steps(groups, SampleKind.TRAINED, _SAMPLE_STEPS)
    filtered = _last_steps(groups, SampleKind.FILTERED, 1)
    parts = [
        _part("Best of the last steps", _ranked(trained, SampleKind.TRAINED, Ranking.BEST)),
        _part("Worst of the last steps", _ranked(trained, SampleKind.TRAINED, Ranking.WORST)),
        *_evaluated_samples(groups),
        _part("Filtered, never trained", _ranked(filtered, SampleKind.FILTERED, Ranking.NEWEST)),
    ]
    return "".join(parts) or "<p class=none>No samples were kept.</p>"


def _evaluated_samples(groups: Sequence[SampleGroup]) -> Iterator[str]:
    sets = sorted({group.evaluation for group in groups if group.kind is SampleKind.EVALUATION})
    for name in sets:
        of_set = _last_steps([group for group in groups if group.evaluation == name], SampleKind.EVALUATION, 1)
        title = "Worst of the last evaluation" + (f", {name}" if len(sets) > 1 else "")
        yield _part(title, _ranked(of_set, SampleKind.EVALUATION, Ranking.WORST))


def _last_steps(groups: Sequence[SampleGroup], kind: SampleKind, steps: int) -> list[SampleGroup]:
    kept = sorted({group.step for group in groups if group.kind is kind})[-steps:]
    return [group for group in groups if group.kind is kind and group.step in kept]


def _ranked(groups: Sequence[SampleGroup], kind: SampleKind, ranking: Ranking) -> list[ChosenSample]:
    return SampleQuery(kinds=frozenset((kind,)), ranking=ranking, limit=_SAMPLES).choose(groups)


def _part(title: str, chosen: Sequence[ChosenSample]) -> str:
    if not chosen:
        return ""
    return f"<h3>{escape(title)}</h3>" + "".join(_sample(*each) for each in chosen)


def _sample(group: SampleGroup, answer: AnswerRecord) -> str:
    facts = [f"step {group.step}", group.domain, *group.tags, group.why, answer.outcome]
    facts.append("" if answer.reward is None else f"reward {answer.reward:.3g}")
    facts.append("" if answer.advantage is None else f"advantage {answer.advantage:+.3g}")
    facts.append(f"{answer.length:,} tokens, ended by {answer.finish_reason}")
    facts.append(", ".join(f"v{version} × {tokens}" for version, tokens in answer.spans))
    head = " · ".join(_inert(fact, 200) for fact in facts if fact)
    texts = (
        ("prompt", group.prompt),
        ("truth", group.ground_truth),
        ("reason", answer.reason),
        ("answer", answer.text),
    )
    body = "".join(f"<dt>{name}</dt><dd>{_inert(text, _SAMPLE_CHARACTERS)}</dd>" for name, text in texts if text)
    return f"<details class=sample open><summary>{head}</summary><dl>{body}</dl></details>"


def _inert(text: str, most: int) -> str:
    return escape(visible(shortened(text, most)))
