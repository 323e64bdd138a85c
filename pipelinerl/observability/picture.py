"""The curves of a run as PNGs, drawn by matplotlib without a display. Matplotlib is imported lazily because it is
slow.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipelinerl.observability.run_history import RunHistory, Series

_BLUE, _ORANGE, _GREEN, _INK, _GRID = "#2a78d6", "#e0662f", "#2e9e6b", "#3d4450", "#e4e7ec"


def draw(history: RunHistory, path: Path) -> Path:
    """Draw reward, held-out accuracy, staleness, tokens/s and the update pause into `path`."""

    def fill(figure: Any) -> None:
        grid = figure.add_gridspec(2, 3, height_ratios=(1.6, 1.0))
        _learning(figure.add_subplot(grid[0, :]), history)
        staleness = figure.add_subplot(grid[1, 0])
        _lines(staleness, "Staleness, versions", "step", [
            ("mean", history.by_step("staleness_mean"), _BLUE), ("max", history.by_step("staleness_max"), _ORANGE),
        ])  # fmt: skip
        speed = history.series(history.engines, "tokens_per_s")
        _lines(figure.add_subplot(grid[1, 1]), "Tokens sampled per second", "seconds", [("", speed, _BLUE)])
        pause = history.series(history.publications, "pause_s", x="model_version")
        pause_ms = Series(pause.x, tuple(1e3 * value for value in pause.y))
        _lines(figure.add_subplot(grid[1, 2]), "Update pause, ms", "model version", [("", pause_ms, _ORANGE)])

    return _save(path, fill, size=(11.0, 6.2))


def draw_mismatch(history: RunHistory, path: Path) -> Path:
    """Draw the trainer-sampler mismatch by cause, as recorded in step events, into `path`."""
    colours = {"numerics": _BLUE, "cache": _GREEN, "staleness": _ORANGE}
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
    reward = history.by_step("reward")
    if reward:
        axes.plot(reward.x, reward.y, color=_BLUE, alpha=0.22, linewidth=0.8)
        axes.plot(reward.x, reward.smoothed().y, color=_BLUE, linewidth=1.8, label="reward, training")
    accuracy = history.series(history.evaluations, "accuracy", x="model_version")
    if accuracy:
        low = history.series(history.evaluations, "low", x="model_version")
        high = history.series(history.evaluations, "high", x="model_version")
        if low.x == high.x == accuracy.x:
            axes.fill_between(accuracy.x, low.y, high.y, color=_ORANGE, alpha=0.16, linewidth=0)
        axes.plot(accuracy.x, accuracy.y, color=_ORANGE, linewidth=1.8, marker="o", markersize=4.5,
                  markeredgecolor="white", label="held-out accuracy, 95 % interval")  # fmt: skip
    _finish(axes, history.run, "step")
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
