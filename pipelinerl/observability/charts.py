"""Line charts: a `Chart` describes the lines, `svg` draws it for a page and `png` draws several into a picture.

In SVG, colours are CSS variables (`--s1` to `--s4`, `--ink`, `--grid`), so one picture serves light and dark pages, and
a chart scales, with its text, to the width of its column. Matplotlib is only used for PNGs: its SVG would have fixed
colours, no tooltips and twice the size, and its import takes 1.6 s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Final

from pipelinerl.observability.run_history import Series

_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 14.0, 12.0, 30.0
#: Curves with more points are thinned to the minimum and maximum of each short interval; more would not be visible.
_MOST_POINTS = 600
#: The colours of lines, and of text and grid, in a PNG.
_COLOURS: Final = ("#2a78d6", "#e0662f", "#2e9e6b", "#3d4450")
_INK, _GRID = "#3d4450", "#e4e7ec"


class Mark(StrEnum):
    """The style in which a series is drawn, such as a line or points."""

    LINE = "line"
    FAINT = "faint"
    """Raw data behind a smoothed line."""
    DOTS = "dots"
    """A line with a dot at each point, for few separate measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One series in a chart. `colour` is 1 to 4; `low` and `high` bound the points' intervals."""

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
    title: str = ""
    unit: str = ""
    y_max: float = 0.0
    percent: bool = False
    marks: tuple[tuple[float, str], ...] = ()
    width: float = 350.0
    height: float = 195.0


def svg(chart: Chart) -> str:
    """Return the chart as SVG; without data, an empty frame that reads "no data"."""
    lines, width, height = [line for line in chart.lines if line.series], chart.width, chart.height
    size = f'viewBox="0 0 {width:g} {height:g}"'
    if not lines:
        middle = f'x="{width / 2:g}" y="{height / 2:g}"'
        return f'<svg {size} role="img"><text class="tick" text-anchor="middle" {middle}>no data</text></svg>'
    ys = [y for line in lines for part in (line.series.y, line.low, line.high) for y in part]
    rounded = ticks(min(0.0, *ys), max(chart.y_max, *ys))
    x0, x1 = min(line.series.x[0] for line in lines), max(line.series.x[-1] for line in lines)
    x1 = x1 if x1 > x0 else x0 + 1.0

    def x(value: float) -> float:
        return _LEFT + (value - x0) / (x1 - x0) * (width - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return height - _BOTTOM - (value - rounded[0]) / (rounded[-1] - rounded[0]) * (height - _TOP - _BOTTOM)

    def text(at: str, anchor: str, words: str) -> str:
        return f'<text class="tick" text-anchor="{anchor}" {at}>{escape(words)}</text>'

    names = ", ".join(line.label for line in lines if line.label)
    parts = [f'<svg {size} role="img" aria-label="{escape(names or chart.x_label)}">']
    for value in ticks(rounded[0], rounded[-1]):
        place = f'x1="{_LEFT:g}" x2="{width - _RIGHT:g}" y1="{y(value):.1f}" y2="{y(value):.1f}"'
        parts.append(f'<line class="{"base" if value == 0 else "grid"}" {place}/>')
        parts.append(text(f'x="{_LEFT - 6:g}" y="{y(value) + 3.5:.1f}"', "end", _tick(chart, value)))
    for value in (value for value in ticks(x0, x1, 6) if x0 <= value <= x1):
        anchor = "end" if x(value) > width - _RIGHT - 8 else "middle"
        parts.append(text(f'x="{x(value):.1f}" y="{height - _BOTTOM + 15:g}"', anchor, compact(value)))
    parts.append(text(f'x="{(_LEFT + width - _RIGHT) / 2:g}" y="{height - 3:g}"', "middle", chart.x_label))
    for at, words in chart.marks:
        if x0 <= at <= x1:
            place = f'x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP:g}" y2="{height - _BOTTOM:g}"'
            parts.append(f'<line class="mark" {place}><title>{escape(f"{words}, at {compact(at)}")}</title></line>')
    return "".join([*parts, *(part for line in lines for part in _drawn(chart, line, x, y)), "</svg>"])


def _drawn(chart: Chart, line: Line, x: Callable[[float], float], y: Callable[[float], float]) -> list[str]:
    def points(xs: Sequence[float], ys: Sequence[float]) -> list[str]:
        return [f"{x(a):.1f} {y(b):.1f}" for a, b in zip(xs, ys, strict=True)]

    series, colour, parts = line.series, f"c{line.colour}", []
    if line.low:
        outline = [*points(series.x, line.high), *reversed(points(series.x, line.low))]
        parts.append(f'<path class="band {colour}" d="M{"L".join(outline)}Z"/>')
    thin = _thinned(series)
    style = "faint" if line.mark is Mark.FAINT else "line"
    parts.append(f'<path class="{style} {colour}" d="M{"L".join(points(thin.x, thin.y))}"/>')
    if line.mark is Mark.DOTS or len(series.x) == 1:
        for a, b in zip(series.x, series.y, strict=True):
            value = f"{b:.1%}" if chart.percent else compact(b) + chart.unit
            title = escape(f"{line.label} {value} at {chart.x_label} {compact(a)}")
            dot = f'<circle class="dot {colour}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3.4">'
            parts.append(f"{dot}<title>{title}</title></circle>")
    return parts


def _thinned(series: Series) -> Series:
    """Thin a long series to the minimum and maximum of each short interval, so that spikes stay visible."""
    points = list(zip(series.x, series.y, strict=True))
    if len(points) <= _MOST_POINTS:
        return series
    kept: list[tuple[float, float]] = []
    stretches = _MOST_POINTS // 2
    for number in range(stretches):
        part = points[number * len(points) // stretches : (number + 1) * len(points) // stretches]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return Series(*zip(*kept, strict=True))


def _tick(chart: Chart, value: float, _: object = None) -> str:
    return f"{value:.0%}" if chart.percent else compact(value) + chart.unit


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


def png(charts: Sequence[Chart], path: Path, *, wide: bool = False) -> Path:
    """Save charts in rows of two, the first alone if `wide`. Raises ModuleNotFoundError without matplotlib."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: Any = {"font.size": 9.0, "axes.edgecolor": _GRID, "axes.titlesize": 10.0, "axes.titleweight": "bold"}
    style |= dict.fromkeys(("axes.labelcolor", "text.color", "xtick.color", "ytick.color"), _INK)
    with mpl.rc_context(style | {"axes.titlelocation": "left"}):
        figure = Figure(figsize=(11.0, 6.2), dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        columns = len(charts) - 1 if wide else 2
        grid = figure.add_gridspec(-(-len(charts) // columns), columns, height_ratios=(1.6, 1.0) if wide else None)
        cells: list[Any] = [grid[0, :]] if wide else []
        cells += [grid[(at + columns * wide) // columns, at % columns] for at in range(len(charts) - wide)]
        for chart, cell in zip(charts, cells, strict=True):
            axes = figure.add_subplot(cell)
            for line in (line for line in chart.lines if line.series):
                series, colour, dots = line.series, _COLOURS[line.colour - 1], line.mark is Mark.DOTS
                faint: Any = {"alpha": 0.22, "linewidth": 0.8} if line.mark is Mark.FAINT else {"linewidth": 1.6}
                if line.low:
                    axes.fill_between(series.x, line.low, line.high, color=colour, alpha=0.16, linewidth=0)
                axes.plot(series.x, series.y, color=colour, label=line.label or None, marker="o" if dots else None,
                          markersize=4.5, markeredgecolor="white", **faint)  # fmt: skip
            axes.set_title(chart.title)
            axes.set_xlabel(chart.x_label)
            axes.yaxis.set_major_formatter(partial(_tick, chart))
            axes.grid(axis="y", color=_GRID, linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.tick_params(length=0)
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False, loc="best")
        figure.savefig(path, facecolor="white", metadata={"Software": None})
    return path
