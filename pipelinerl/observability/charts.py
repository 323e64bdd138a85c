"""Line charts: pure functions turn numbers into inline SVG; matplotlib draws PNGs.

Colours are CSS variables (`--s1` to `--s3`, `--ink`, `--grid`), so one picture serves light and dark pages. A chart
scales, with its text, to the width of its column. Matplotlib is only used for PNGs: its SVG would have fixed colours,
no tooltips and twice the size, and its import takes 1.6 s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from html import escape
from pathlib import Path
from typing import Any

from pipelinerl.observability.run_history import RunHistory, Series

_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 14.0, 12.0, 30.0
#: Curves with more points are thinned to the minimum and maximum of each short interval; more would not be visible.
_MOST_POINTS = 600


class Mark(StrEnum):
    """The style in which a series is drawn, such as a line or points."""

    LINE = "line"
    FAINT = "faint"
    """Raw data behind a smoothed line."""
    DOTS = "dots"
    """A line with a dot at each point, for few separate measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One series in a chart. `colour` n is the CSS variable `--s<n>`; `low` and `high` bound the points' intervals."""

    series: Series
    label: str = ""
    colour: int = 1
    mark: Mark = Mark.LINE
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines over one x axis; `unit` is appended to the labels of the y axis, which reaches at least `y_max`.

    `marks` are places on the x axis, each with a text, such as a changed knob.
    """

    lines: tuple[Line, ...]
    x_label: str
    unit: str = ""
    y_max: float = 0.0
    percent: bool = False
    marks: tuple[tuple[float, str], ...] = ()
    width: float = 350.0
    height: float = 195.0


@dataclass(frozen=True, slots=True)
class _Frame:
    chart: Chart
    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x0) / (self.x1 - self.x0) * (self.chart.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return (
            self.chart.height - _BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (self.chart.height - _TOP - _BOTTOM)
        )


def svg(chart: Chart) -> str:
    """Return the chart as SVG; without data, an empty frame that reads "no data"."""
    lines = [line for line in chart.lines if line.series]
    size = f'viewBox="0 0 {chart.width:g} {chart.height:g}"'
    if not lines:
        middle = f'x="{chart.width / 2:g}" y="{chart.height / 2:g}"'
        return f'<svg {size} role="img"><text class="tick" text-anchor="middle" {middle}>no data</text></svg>'
    frame = _frame(chart, lines)
    names = ", ".join(line.label for line in lines if line.label)
    parts = [f'<svg {size} role="img" aria-label="{escape(names or chart.x_label)}">', *_axes(frame)]
    for at, text in chart.marks:
        if frame.x0 <= at <= frame.x1:
            place = f'x1="{frame.x(at):.1f}" x2="{frame.x(at):.1f}" y1="{_TOP:g}" y2="{chart.height - _BOTTOM:g}"'
            parts.append(f'<line class="mark" {place}><title>{escape(f"{text}, at {compact(at)}")}</title></line>')
    for line in lines:
        parts += _drawn(frame, line)
    return "".join([*parts, "</svg>"])


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers that cover `low` to `high` (steps of 1, 2 or 5 times 10ⁿ)."""
    span = high - low
    if not span > 0:
        span = abs(high) or 1.0
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [number * step for number in range(first, last + 1)]


def compact(value: float) -> str:
    """Format a number briefly, for an axis or a summary tile: 1.2M, 12.3k, 412, 3.5, 0.012."""
    size = abs(value)
    for limit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= max(limit, 1e4) or (size >= limit and value % 100 == 0):
            return f"{value / limit:.3g}{name}"
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _frame(chart: Chart, lines: Sequence[Line]) -> _Frame:
    xs = [x for line in lines for x in (line.series.x[0], line.series.x[-1])]
    ys = [y for line in lines for part in (line.series.y, line.low, line.high) for y in part]
    rounded = ticks(min(0.0, *ys), max(chart.y_max, *ys))
    x0, x1 = min(xs), max(xs)
    return _Frame(chart, x0, x1 if x1 > x0 else x0 + 1.0, rounded[0], rounded[-1])


def _axes(frame: _Frame) -> list[str]:
    chart, parts = frame.chart, []
    for value in ticks(frame.y0, frame.y1):
        y = frame.y(value)
        text = f"{value:.0%}" if chart.percent else compact(value) + chart.unit
        kind = "base" if value == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{_LEFT:g}" x2="{chart.width - _RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{_LEFT - 6:g}" y="{y + 3.5:.1f}">{escape(text)}</text>')
    inside = [value for value in ticks(frame.x0, frame.x1, 6) if frame.x0 <= value <= frame.x1]
    bottom = chart.height - _BOTTOM + 15
    for value in inside:
        x = frame.x(value)
        anchor = "end" if x > chart.width - _RIGHT - 8 else "middle"
        parts.append(f'<text class="tick" text-anchor="{anchor}" x="{x:.1f}" y="{bottom:g}">{compact(value)}</text>')
    middle = (_LEFT + chart.width - _RIGHT) / 2
    name = escape(chart.x_label)
    parts.append(f'<text class="tick" text-anchor="middle" x="{middle:g}" y="{chart.height - 3:g}">{name}</text>')
    return parts


def _drawn(frame: _Frame, line: Line) -> list[str]:
    colour = f"c{line.colour}"
    points = _thinned(line.series)
    path = "M" + "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in points)
    parts = []
    if line.low:
        upper = [f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in zip(line.series.x, line.high, strict=True)]
        lower = [f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in zip(line.series.x, line.low, strict=True)]
        parts.append(f'<path class="band {colour}" d="M{"L".join([*upper, *reversed(lower)])}Z"/>')
    parts.append(f'<path class="{"faint" if line.mark is Mark.FAINT else "line"} {colour}" d="{path}"/>')
    if line.mark is Mark.DOTS or len(points) == 1:
        for x, y in zip(line.series.x, line.series.y, strict=True):
            value = f"{y:.1%}" if frame.chart.percent else compact(y) + frame.chart.unit
            title = escape(f"{line.label} {value} at {frame.chart.x_label} {compact(x)}")
            dot = f'<circle class="dot {colour}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3.4">'
            parts.append(f"{dot}<title>{title}</title></circle>")
    return parts


def _thinned(series: Series) -> list[tuple[float, float]]:
    """Thin a long series to the minimum and maximum of each short interval, so that spikes stay visible."""
    points = list(zip(series.x, series.y, strict=True))
    if len(points) <= _MOST_POINTS:
        return points
    kept: list[tuple[float, float]] = []
    stretches = _MOST_POINTS // 2
    for number in range(stretches):
        part = points[number * len(points) // stretches : (number + 1) * len(points) // stretches]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept


_BLUE, _ORANGE, _GREEN, _INK, _GRID = "#2a78d6", "#e0662f", "#2e9e6b", "#3d4450", "#e4e7ec"


def draw(history: RunHistory, path: Path) -> Path:
    """Draw reward, held-out accuracy, staleness, tokens/s and the update pause, and save the picture to `path`."""

    def fill(figure: Any) -> None:
        grid = figure.add_gridspec(2, 3, height_ratios=(1.6, 1.0))
        _learning(figure.add_subplot(grid[0, :]), history)
        staleness = figure.add_subplot(grid[1, 0])
        _lines(staleness, "Staleness, versions (1 = on policy)", "step", [
            ("mean", history.by_step("staleness_mean"), _BLUE), ("max", history.by_step("staleness_max"), _ORANGE),
        ])  # fmt: skip
        speed = history.series(history.engines, "tokens_per_s")
        _lines(figure.add_subplot(grid[1, 1]), "Tokens sampled per second", "seconds", [("", speed, _BLUE)])
        pause = history.update_ms("pause_s")
        _lines(figure.add_subplot(grid[1, 2]), "Update pause, ms", "model version", [("", pause, _ORANGE)])

    return _save(path, fill, size=(11.0, 6.2))


def draw_mismatch(history: RunHistory, path: Path) -> Path:
    """Draw the trainer-sampler mismatch by cause, as recorded in step events, and save the picture to `path`."""
    colours = {"numerics": _BLUE, "cache": _GREEN, "staleness": _ORANGE, "truncation": _INK}
    panels = (
        ("p95", "P95 |Δ log-prob|, nats"),
        ("response_max", "Max |Δp| of a response, mean over responses"),
        ("ess", "Effective sample size, of 1"),
        ("share", "Share of the tokens"),
    )

    def fill(figure: Any) -> None:
        for place, (name, title) in enumerate(panels, start=1):
            axes = figure.add_subplot(2, 2, place)
            lines = [(c, history.by_step(f"mismatch_{c}_{name}"), colour) for c, colour in colours.items()]
            _lines(axes, title, "step", lines)

    return _save(path, fill, size=(11.0, 6.2))


def _save(path: Path, fill: Callable[[Any], None], *, size: tuple[float, float]) -> Path:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: Any = {
        "font.size": 9.0,
        "axes.edgecolor": _GRID,
        "axes.labelcolor": _INK,
        "text.color": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "axes.titlesize": 10.0,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=size, dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        fill(figure)
        figure.savefig(path, facecolor="white", metadata={"Software": None})
    return path


def _learning(axes: Any, history: RunHistory) -> None:
    reward = history.by_sampling_version()
    if reward:
        axes.plot(reward.x, reward.y, color=_BLUE, alpha=0.22, linewidth=0.8)
        axes.plot(reward.x, reward.smoothed().y, color=_BLUE, linewidth=1.8, label="reward, training")
    accuracy, low, high = history.accuracy(history.evaluations)
    if accuracy:
        if low:
            axes.fill_between(accuracy.x, low, high, color=_ORANGE, alpha=0.16, linewidth=0)
        axes.plot(accuracy.x, accuracy.y, color=_ORANGE, linewidth=1.8, marker="o", markersize=4.5,
                  markeredgecolor="white", label="held-out accuracy, 95 % interval")  # fmt: skip
    _finish(axes, history.run, "model version")
    if reward or accuracy:
        axes.legend(frameon=False, loc="best")


def _lines(axes: Any, title: str, x_label: str, lines: list[tuple[str, Series, str]]) -> None:
    for label, series, colour in lines:
        if series:
            axes.plot(series.x, series.y, color=colour, linewidth=1.2, label=label or None)
    _finish(axes, title, x_label)
    if any(label and series for label, series, _ in lines):
        axes.legend(frameon=False, loc="best", fontsize=8)


def _finish(axes: Any, title: str, x_label: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
