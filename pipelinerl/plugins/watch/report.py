"""The report of a run: one self-contained HTML file, and the learning curve as a PNG.

These are made from `events.jsonl` and `recipe.toml` in the run's directory, even while the run is live. The page loads
no external resources, works in light and dark mode, on a phone and on paper, and escapes every value.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from string import Template
from typing import Any, Final, NamedTuple

import typer

from pipelinerl.errors import UserError
from pipelinerl.observability.charts import Chart, Line, Mark, compact, png, svg
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
from pipelinerl.observability.samples import (
    AnswerRecord,
    Ranking,
    SampleGroup,
    SampleKind,
    SampleQuery,
    one_line,
    read_samples,
    shortened,
    visible,
)
from pipelinerl.observability.status import format_duration
from pipelinerl.observability.summary import interval, note, outcome, summary_rows, weights
from pipelinerl.roles.role import RunPath

_PAGE: Final = Path(__file__).with_name("report_page.html")
#: Number of domains that charts show, each in a colour of its own; the table shows all.
_MOST_DOMAINS: Final = 3
#: Number of last steps over which the table of domains averages.
_STEPS: Final = 10
_OF_SHARE: Final[dict[str, Any]] = {"percent": True, "y_max": 1.0}

EVALUATION_HEAD: Final = ("step", "accuracy", "95 %", "pass@k", "problems × samples", "tokens", "weights", "note")
GROUP_HEAD: Final = ("", "problems", "accuracy", "95 %", "pass@k, maj@k", "tokens", "truncated")
DOMAIN_HEAD: Final = (
    "last steps", "rollouts", "reward", "right", "tokens", "P95", "truncated", "unjudged", "all right", "all wrong",
    "stale", "verifier",
)  # fmt: skip
EPISODE_HEAD: Final = ("last steps", "turns", "segments", "seconds outside the model", "calls", "failed", "malformed")


class ReportFiles(NamedTuple):
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
        return list(write_report(run_dir))
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise UserError(f"{run_dir} has no readable events.jsonl to report on: {error}") from None
    except OSError as error:
        raise UserError(f"the report of {run_dir} cannot be written: {error}") from None
    except ModuleNotFoundError:  # after the page was written
        typer.echo("learning_curve.png needs matplotlib, which is not installed; pip install -e '.[report]'", err=True)
        return [run_dir / "report.html"]


def write_report(run_dir: Path) -> ReportFiles:
    """Write page and picture into the run's directory. Raises FileNotFoundError without a log, or OSError."""
    history = tell(read_events(run_dir / "events.jsonl"))
    recipe = run_dir / "recipe.toml"
    text = recipe_without_secrets(recipe.read_text()) if recipe.is_file() else ""
    page = without_secrets(render(history, text, samples=read_samples(run_dir)))
    files = ReportFiles(run_dir / "report.html", run_dir / "learning_curve.png")
    with _in_place_of(files.html) as draft:
        draft.write_text(page)
    with _in_place_of(files.picture) as draft:
        png([replace(learning_chart(history), title=history.run), *_pace_charts(history)], draft, wide=True)
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
    learning = learning_chart(history)
    wide, narrow = replace(learning, width=900, height=330), replace(learning, width=420, height=300)
    figures = (
        f"<figure><figcaption>{escape(chart.title)}</figcaption>{_legend(chart)}{svg(chart)}</figure>"
        for chart in _charts(history)
    )
    domains, episodes = domain_rows(history), episode_rows(history)
    changes = [
        (_when(event), str(event.get("step", "")), changes_words(event.get("changes")), str(event.get("who", "")))
        for event in history.knobs
    ]
    return Template(_PAGE.read_text()).substitute(
        run=escape(history.run),
        outcome=escape(outcome(history)),
        state="live" if history.finished is None else "over",
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        tiles="".join(
            f"<div class=tile><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(small)}</small></dd></div>"
            for name, value, small in _tiles(history)
        ),
        learning=f"{_legend(learning)}<div class=for-wide>{svg(wide)}</div><div class=for-narrow>{svg(narrow)}</div>",
        charts="".join(figures),
        summary=_table(("", ""), summary_rows(history)),
        evaluations=_evaluations(history),
        domains=_table(DOMAIN_HEAD, domains, "No step was taken.") + _table(EPISODE_HEAD, episodes),
        samples=samples_section(samples),
        knobs=_table(("time", "step", "changed", "by"), changes, "No knobs were changed."),
        incidents=_incidents(history),
        recipe=escape(recipe.strip() or "(no recipe was found)"),
    )


def _tiles(history: RunHistory) -> Iterator[tuple[str, str, str]]:
    def since(first: float | None, form: str) -> str:
        return "" if first is None else f"from {first:{form}}"

    if (evaluation := history.last_evaluation) is not None:
        yield "held-out accuracy", f"{evaluation['accuracy']:.1%}", since(history.first_accuracy, ".1%")
        for each in evaluation.get("pass_at") or ():
            yield f"pass@{each['k']}", f"{each['value']:.1%}", "held out"
        for name, first, last in history.other_accuracies:
            yield name, f"{last:.1%}", since(first, ".1%")
    if history.last_reward is not None:
        notes = (since(history.first_reward, ".3f"), f"{history.unjudged:.1%} unjudged" if history.unjudged else "")
        yield "reward", f"{history.last_reward:.3f}", ", ".join(filter(None, notes))
    if history.steps:
        yield "steps", f"{len(history.steps):,}", f"in {format_duration(history.duration_s)}"
    speed, busy = history.median(history.engines, "tokens_per_s"), history.median(history.engines, "occupancy")
    if speed is not None:
        yield "tokens/s", compact(speed), "" if busy is None else f"engines {busy:.0%} busy"
    stale, most = history.median(history.steps, "staleness_mean"), history.max_of(history.steps, "staleness_max")
    if stale is not None and most is not None:
        yield "staleness", f"{stale:.1f}", f"at most {most:.0f} versions; 1 = on policy"
    pause, longest = history.median(history.publications, "pause_s"), history.max_of(history.publications, "pause_s")
    if pause is not None and longest is not None:
        yield "update pause", f"{pause * 1e3:.3g} ms", f"at most {longest * 1e3:.3g} ms"


# --- charts -----------------------------------------------------------------------------------------------------------


def learning_chart(history: RunHistory) -> Chart:
    """Return the chart of the training reward and the held-out accuracy by model version."""
    reward = history.by_sampling_version()
    accuracy, low, high = history.accuracy(history.evaluations)
    lines = (
        Line(series=reward, mark=Mark.FAINT),
        Line(series=reward.smoothed(), label="reward, training"),
        Line(series=accuracy, label="held-out accuracy", colour=2, mark=Mark.DOTS, low=low, high=high),
    )
    is_share = all(0 <= value <= 1 for line in lines for value in line.series.y)
    return Chart(lines=lines, x_label="model version", percent=is_share, y_max=1.0 if is_share else 0.0)


def _chart(title: str, series: Mapping[str, Series] | Series, *, x_label: str = "step", **options: Any) -> Chart:
    named = {"": series} if isinstance(series, Series) else series
    lines = (Line(series=each, label=label, colour=at) for at, (label, each) in enumerate(named.items(), start=1))
    return Chart(title=title, lines=tuple(lines), x_label=x_label, **options)


def _pace_charts(history: RunHistory) -> list[Chart]:
    staleness = {name: history.by_step(f"staleness_{name}") for name in ("mean", "max")}
    speed, pause = history.series(history.engines, "tokens_per_s"), history.update_ms("pause_s")
    return [
        _chart("Staleness, in versions (1 = on policy)", staleness),
        _chart("Tokens sampled per second", speed, x_label="seconds"),
        _chart("Update pause, no token decoded", pause, x_label="model version", unit=" ms"),
    ]


def _charts(history: RunHistory) -> list[Chart]:
    steps, engines, sets = history.by_step, partial(history.series, history.engines), history.evaluation_sets
    charts = [
        Chart(title="Held-out accuracy by set", lines=_accuracy_lines(history), x_label="step", **_OF_SHARE),
        *(
            Chart(
                title=f"pass@k, {'held out' if name == HELD_OUT else name}",
                lines=_pass_at_lines(events),
                x_label="step",
                **_OF_SHARE,
            )
            for name, events in sets.items()
        ),
        *_pace_charts(history),
        _chart("Busy engine slots", engines("occupancy"), x_label="seconds", **_OF_SHARE),
        _chart("Duration of a weight update", history.update_ms("total_s"), x_label="model version", unit=" ms"),
        _chart("Step time", {"step": steps("step_s"), "waiting for rollouts": steps("wait_s")}, unit=" s"),
        _chart("Gradient norm", steps("grad_norm")),
        _chart("Loss", steps("loss")),
        _chart("Learning rate", steps("learning_rate")),
        _chart("Share of tokens clipped", steps("clip_fraction"), percent=True),
        *update_charts(history),
        _chart("Effective sample size, of 1", steps("ess"), **_OF_SHARE),
        *domain_charts(history),
        mismatch_chart(history, "p95", "Trainer − sampler, P95 |Δ log-prob|"),
        mismatch_chart(history, "response_max", "Trainer − sampler, max |Δp| of a response"),
    ]
    changed = tuple((amount(each, "step"), changes_words(each.get("changes"))) for each in history.knobs)
    drawn = (chart for chart in charts if any(line.series for line in chart.lines))
    return [replace(chart, marks=changed) if chart.x_label == "step" else chart for chart in drawn]


def mismatch_chart(history: RunHistory, figure: str, title: str) -> Chart:
    """Return the chart of a statistic of the trainer-sampler mismatch by step, with a line per cause."""
    causes = ("numerics", "staleness", "cache", "truncation")
    return _chart(title, {cause: history.by_step(f"mismatch_{cause}_{figure}") for cause in causes})


def update_charts(history: RunHistory) -> list[Chart]:
    """Return charts of KL from π_old and clipping, by optimizer step, and of optimizer steps per training step.

    The charts have no data if each training step has one optimizer step. Optimizer step n of the N in training step v
    has x = v − 1 + n/N.
    """

    def by_update(name: str) -> Series:
        points = [
            (float(event["step"]) - 1 + number / len(event["updates"]), float(update[name]))
            for event in history.steps
            for number, update in enumerate(event.get("updates", ()), start=1)
            if name in update
        ]
        return Series(tuple(x for x, _ in points), tuple(y for _, y in points))

    return [
        _chart("KL from π_old at each optimizer step", by_update("kl_old"), unit=" nats"),
        _chart("Share of tokens clipped at each optimizer step", by_update("clip_fraction"), percent=True),
        _chart("Optimizer steps per step", history.by_step("optimizer_steps")),
    ]


def domain_charts(history: RunHistory) -> list[Chart]:
    """Return charts of entropy, length, and metrics of the first domains; rewards over the sampling version."""
    names, steps = list(groups_of(history.steps, "by_domain"))[:_MOST_DOMAINS], history.by_step
    placed = placed_by_version(history.steps)

    def by_domain(figure: str) -> dict[str, Series]:
        x = "sampled_version" if figure in OF_SAMPLER else "step"
        rows = {
            name: [{x: step[x], **each} for step in placed for each in groups_of([step], "by_domain").get(name, ())]
            for name in names
        }
        return {name: history.series(each, figure, x=x) for name, each in rows.items()}

    reward = {name: series.smoothed() for name, series in by_domain("reward").items()}
    entropies = {"of the sampled tokens": steps("entropy"), "exact": steps("exact_entropy")}
    return [
        _chart("Entropy, nats per token", entropies),
        _chart("Answer length, tokens", {"mean": steps("length_mean"), "P95": steps("length_p95")}),
        _chart("Reward by domain, smoothed", reward, x_label="model version"),
        _chart("Accuracy by domain", by_domain("accuracy"), x_label="model version", **_OF_SHARE),
        _chart("Mean length by domain", by_domain("length_mean")),
        _chart("Share truncated by domain", by_domain("truncated"), percent=True),
        _chart("Share stale by domain", by_domain("stale"), percent=True),
    ]


def _accuracy_lines(history: RunHistory) -> tuple[Line, ...]:
    """Return a line per evaluation set: accuracy by step, with intervals. Empty if there is only one set."""
    if len(history.evaluation_sets) < 2:
        return ()
    curves = ((name, *history.accuracy(events)) for name, events in history.evaluation_sets.items())
    return tuple(
        Line(series=accuracy, label=name, colour=1 + at % 3, mark=Mark.DOTS, low=low, high=high)
        for at, (name, accuracy, low, high) in enumerate(curves)
    )


def _pass_at_lines(evaluations: Sequence[Event]) -> tuple[Line, ...]:
    """Return a line for each k: pass@k of one set by step, with intervals."""
    points: dict[int, list[tuple[float, ...]]] = {}
    for event in evaluations:
        for each in event.get("pass_at") or ():
            values = (event["model_version"], each["value"], each["low"], each["high"])
            points.setdefault(each["k"], []).append(tuple(map(float, values)))
    columns: list[tuple[Any, ...]] = [(k, *zip(*each, strict=True)) for k, each in sorted(points.items())]
    return tuple(
        Line(series=Series(x, value), label=f"pass@{k}", colour=1 + at % 3, mark=Mark.DOTS, low=low, high=high)
        for at, (k, x, value, low, high) in enumerate(columns)
    )


def _legend(chart: Chart) -> str:
    named = [line for line in chart.lines if line.label and line.series]
    if len(named) < 2:
        return ""
    keys = "".join(f"<span><i class=c{line.colour}></i>{escape(line.label)}</span>" for line in named)
    return f"<div class=legend>{keys}</div>"


# --- tables -----------------------------------------------------------------------------------------------------------


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], without: str = "") -> str:
    """Return a table or, if it has no rows, the sentence `without`."""
    if not rows:
        return f"<p class=none>{without}</p>" if without else ""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    thead = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
    return f"<div class=scroll><table>{thead}<tbody>{body}</tbody></table></div>"


def _evaluations(history: RunHistory) -> str:
    parts = []
    for name, evaluations in history.evaluation_sets.items():
        groups = group_rows(evaluations)
        parts.append(f"<h3>{escape(name)}</h3>" if len(history.evaluation_sets) > 1 else "")
        parts.append(_table(EVALUATION_HEAD, evaluation_rows(evaluations)))
        parts.append(_table(GROUP_HEAD, groups) if len(groups) > 1 else "")
    return "".join(parts) or "<p class=none>Nothing was evaluated.</p>"


def evaluation_rows(evaluations: Sequence[Event]) -> list[tuple[str, ...]]:
    """Return a table row for each evaluation of one set, with the columns `EVALUATION_HEAD`."""
    return [
        (
            f"{event['model_version']}",
            _shown(event.get("accuracy"), ".1%"),
            interval(event),
            _chances(event),
            f"{event.get('problems', '?')} × {event.get('samples', 1)}",
            _lengths(event),
            weights(event),
            note(event),
        )
        for event in evaluations
    ]


def group_rows(evaluations: Sequence[Event]) -> list[tuple[str, ...]]:
    """Return rows by domain, then by tag, of the last evaluation with domains, in the columns `GROUP_HEAD`."""
    last = next((event for event in reversed(evaluations) if event.get("by_domain")), {})
    return [
        (
            f"{what} {name}",
            f"{figures['problems']}",
            _shown(figures.get("accuracy"), ".1%"),
            interval(figures),
            _chances(figures),
            _lengths(figures),
            "" if figures.get("truncated") is None else f"{figures['truncated']:.1%}",
        )
        for what in ("domain", "tag")
        for name, figures in last.get(f"by_{what}", {}).items()
    ]


def _chances(figures: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}{each['k']} {each['value']:.1%} ({interval(each)})"
        for name, field in (("@", "pass_at"), ("maj@", "majority_at"))
        for each in figures.get(field) or ()
    )


def _lengths(figures: Mapping[str, Any]) -> str:
    mean, p95 = figures.get("length_mean"), figures.get("length_p95")
    return "" if mean is None or p95 is None else f"{mean:.0f}, P95 {p95:.0f}"


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def domain_rows(history: RunHistory) -> list[tuple[str, ...]]:
    """Return rows by domain, then by tag, with the columns `DOMAIN_HEAD`: means over the last steps' rollouts."""
    rows = []
    groups = [groups_of(history.steps[-_STEPS:], field).items() for field in ("by_domain", "by_tag")]
    for name, figures in (pair for pairs in groups for pair in pairs):
        mean = partial(mean_of, figures)
        parts = sorted({key.removeprefix("reward.") for each in figures for key in each if key.startswith("reward.")})
        rewards = [f"{one_line(part)} {_shown(mean(f'reward.{part}'), '.3f')}" for part in parts]
        seconds, errors = mean("verifier_s", weight="verified"), sum(each.get("verifier_errors", 0) for each in figures)
        rows.append(
            (
                one_line(name),
                f"{sum(each.get('rollouts', 0) for each in figures):,.0f}",
                ", ".join([_shown(mean("reward"), ".3f"), *rewards]),
                _shown(mean("accuracy"), ".1%"),
                _shown(mean("length_mean"), ".1f"),
                _shown(mean("length_p95"), ".1f"),
                *(_shown(mean(figure), ".1%") for figure in ("truncated", "unjudged", "all_right", "all_wrong")),
                _shown(stale_share(figures), ".1%"),
                "–" if seconds is None else f"{seconds * 1e3:.3g} ms" + (f", {errors:.0f} errors" if errors else ""),
            )
        )
    return rows


def episode_rows(history: RunHistory) -> list[tuple[str, ...]]:
    """Return a row for each domain that has episodes: means per episode and sums of tool calls (`EPISODE_HEAD`)."""
    rows = []
    for name, figures in groups_of(history.steps[-_STEPS:], "by_domain").items():
        if (turns := mean_of(figures, "turns")) is None:
            continue
        segments, seconds = mean_of(figures, "segments"), mean_of(figures, "environment_s", weight="episodes")
        kinds = ("calls_parsed", "tool_errors", "calls_malformed")
        calls = (f"{sum(each.get(kind, 0) for each in figures):,.0f}" for kind in kinds)
        rows.append((one_line(name), *(_shown(value, ".3g") for value in (turns, segments, seconds)), *calls))
    return rows


def _incidents(history: RunHistory) -> str:
    rows = []
    for each in history.incidents:
        named = ((k, v) for k, v in each.event.items() if k not in ("time", "kind", "elapsed_s", "decision"))
        details = ", ".join(f"{k} {v}" for k, v in named if v is not None)
        lasted = format_duration(each.seconds) if each.seconds else ""
        rows.append((_when(each.event), each.kind.replace("_", " "), str(each.count), lasted, details))
    return _table(("last at", "event", "times", "lasted", "details"), rows, "None.")


def _when(event: Event) -> str:
    return format_duration(float(event.get("elapsed_s") or 0.0))


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

    def part(title: str, kind: SampleKind, ranking: Ranking, steps: int = 1, of_set: str | None = None) -> str:
        of_kind = [each for each in groups if each.kind is kind and of_set in (None, each.evaluation)]
        last = sorted({group.step for group in of_kind})[-steps:]
        query = SampleQuery(kinds=frozenset((kind,)), ranking=ranking, limit=_SAMPLES)
        chosen = query.choose(group for group in of_kind if group.step in last)
        return f"<h3>{escape(title)}</h3>" + "".join(_sample(*each) for each in chosen) if chosen else ""

    sets = sorted({group.evaluation for group in groups if group.kind is SampleKind.EVALUATION})
    worst = "Worst of the last evaluation"
    parts = [
        part("Best of the last steps", SampleKind.TRAINED, Ranking.BEST, _SAMPLE_STEPS),
        part("Worst of the last steps", SampleKind.TRAINED, Ranking.WORST, _SAMPLE_STEPS),
        *(
            part(f"{worst}, {name}" if len(sets) > 1 else worst, SampleKind.EVALUATION, Ranking.WORST, of_set=name)
            for name in sets
        ),
        part("Filtered, never trained", SampleKind.FILTERED, Ranking.NEWEST),
    ]
    return "".join(parts) or "<p class=none>No samples were kept.</p>"


def _sample(group: SampleGroup, answer: AnswerRecord) -> str:
    facts = [
        *(f"step {group.step}", group.domain, *group.tags, group.why, answer.outcome),
        "" if answer.reward is None else f"reward {answer.reward:.3g}",
        "" if answer.advantage is None else f"advantage {answer.advantage:+.3g}",
        f"{answer.length:,} tokens, ended by {answer.finish_reason}",
        ", ".join(f"v{version} × {tokens}" for version, tokens in answer.spans),
    ]
    texts = {"prompt": group.prompt, "truth": group.ground_truth, "reason": answer.reason, "answer": answer.text}
    head = " · ".join(_inert(fact, 200) for fact in facts if fact)
    body = "".join(
        f"<dt>{name}</dt><dd>{_inert(text, _SAMPLE_CHARACTERS)}</dd>" for name, text in texts.items() if text
    )
    return f"<details class=sample open><summary>{head}</summary><dl>{body}</dl></details>"


def _inert(text: str, most: int) -> str:
    return escape(visible(shortened(text, most)))
