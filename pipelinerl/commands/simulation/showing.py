"""Output of predictions: a table, JSON, and a page with plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from pipelinerl.observability.charts import Chart, Line, Mark, svg
from pipelinerl.observability.run_history import Series
from pipelinerl.simulation.prediction import Prediction, Trial

#: Heading, attribute and format of each column.
_COLUMNS: Final = (
    ("tokens/s", "tokens_per_s", ",.0f"),
    ("rollouts/s", "rollouts_per_s", ",.1f"),
    ("steps/h", "steps_per_hour", ",.0f"),
    ("step", "step_s", ",.3g"),
    ("trainer waits", "trainer_wait", ".0%"),
    ("held by updates", "trainer_held", ".0%"),
    ("engines idle", "engine_idle", ".0%"),
    ("rows", "rows", ",.0f"),
    ("age", "staleness_mean", ".1f"),
    ("discarded", "discarded", ".1%"),
)
_COST: Final = (("per hour", "cost_per_hour", ",.2f"), ("per 10⁶ tokens", "cost_per_million_tokens", ",.3g"))
_STYLE: Final = """
:root { --ink:#171b22; --soft:#5c6675; --grid:#e6e9ee; --base:#c3c9d2; --card:#fff; --s1:#2a78d6; }
@media (prefers-color-scheme: dark) {
  :root { --ink:#e8ebf0; --soft:#97a1b0; --grid:#272e38; --base:#444d5a; --card:#181d24; --s1:#5aa2f2; }
}
body { margin:0 auto; max-width:1080px; padding:24px; background:var(--card); color:var(--ink);
  font:15px/1.5 system-ui,sans-serif; }
.charts { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(100%,320px),1fr)); gap:14px; }
figure { margin:0; } figcaption { font-weight:600; font-size:13.5px; }
svg { width:100%; height:auto; } svg .c1 { --c:var(--s1); } svg path { fill:none; stroke:var(--c); stroke-width:2; }
svg .dot { fill:var(--c); } svg .grid { stroke:var(--grid); } svg .base { stroke:var(--base); }
svg .tick { fill:var(--soft); font-size:11px; }
table { border-collapse:collapse; font-variant-numeric:tabular-nums; font-size:14px; }
th,td { text-align:right; padding:4px 14px 4px 0; } th { color:var(--soft); font-weight:500; }
th:first-child,td:first-child { text-align:left; }
"""


def lines_of(trials: Sequence[Trial]) -> list[str]:
    """Return a heading and a line per trial; the line of an invalid trial states the reason."""
    rows = [["", *_headings(trials)], *([_name(trial), *_cells(trial, trials)] for trial in trials if trial.prediction)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    return [*lines, *(f"{_name(trial)}: {trial.refusal}" for trial in trials if trial.prediction is None)]


def json_of(
    trials: Sequence[Trial], *, best: Trial | None, checks: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Return all figures of the trials as JSON values."""
    return {
        "trials": [
            {
                "changes": list(trial.changes),
                "engines": trial.engines,
                "refusal": trial.refusal,
                "prediction": None if trial.prediction is None else trial.prediction.as_dict(),
            }
            for trial in trials
        ],
        "recommended": None if best is None else list(best.changes),
        "checks": checks,
    }


def page_of(title: str, trials: Sequence[Trial], notes: Sequence[str]) -> str:
    """Return a self-contained HTML page: notes, a table, a plot of each figure over the trials, and ages of
    rollouts.
    """
    ran = [trial for trial in trials if trial.prediction is not None]
    figures = [_figure(heading, _over_trials(ran, attribute, form)) for heading, attribute, form in _COLUMNS]
    figures += [
        _figure(f"Age of trained rollouts: {_name(t)}", _ages(t.prediction)) for t in ran if t.prediction is not None
    ]
    head = "".join(f"<th>{escape(heading)}</th>" for heading in ("changed", *_headings(trials)))
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in (_name(trial), *_cells(trial, trials))) + "</tr>"
        for trial in trials
    )
    paragraphs = "".join(f"<p>{escape(note)}</p>" for note in notes)
    numbered = "; ".join(f"{number}: {_name(trial)}" for number, trial in enumerate(ran, start=1))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1>{paragraphs}<table><tr>{head}</tr>{rows}</table>"
        f'<p>Trials: {escape(numbered)}</p><div class="charts">{"".join(figures)}</div></html>\n'
    )


def _headings(trials: Sequence[Trial]) -> list[str]:
    return [heading for heading, *_ in (*_COLUMNS, *(_COST if _has_prices(trials) else ()))]


def _cells(trial: Trial, trials: Sequence[Trial]) -> list[str]:
    if trial.prediction is None:
        return [trial.refusal, *[""] * (len(_headings(trials)) - 1)]
    columns = (*_COLUMNS, *(_COST if _has_prices(trials) else ()))
    return [format(getattr(trial.prediction, attribute), form) for _, attribute, form in columns]


def _has_prices(trials: Sequence[Trial]) -> bool:
    return any(trial.prediction is not None and trial.prediction.cost_per_hour for trial in trials)


def _name(trial: Trial) -> str:
    return " ".join(trial.changes) or "the unchanged recipe"


def _figure(title: str, chart: Chart) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg(chart)}</figure>"


def _over_trials(trials: Sequence[Trial], attribute: str, form: str) -> Chart:
    values = tuple(float(getattr(trial.prediction, attribute)) for trial in trials)
    series = Series(tuple(float(number) for number in range(1, len(values) + 1)), values)
    return Chart(lines=(Line(series=series, mark=Mark.DOTS),), x_label="trial", percent=form.endswith("%"))


def _ages(prediction: Prediction) -> Chart:
    series = Series(tuple(map(float, prediction.staleness)), tuple(prediction.staleness.values()))
    return Chart(lines=(Line(series=series, mark=Mark.DOTS),), x_label="versions", percent=True)
