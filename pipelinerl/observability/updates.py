"""Charts of optimizer steps, where a step of the run is several: how far each was from π_old, and what it clipped."""

from __future__ import annotations

from collections.abc import Iterator

from pipelinerl.observability.charts import Chart, Line
from pipelinerl.observability.run_history import RunHistory, Series


def update_charts(history: RunHistory) -> Iterator[tuple[str, Chart]]:
    """(title, chart) of each; those of runs without such steps are empty."""
    kl, clipped = (_by_update(history, name) for name in ("kl_old", "clip_fraction"))
    yield "KL from π_old at each optimizer step", Chart(lines=(Line(series=kl),), x_label="step", unit=" nats")
    yield (
        "Share of tokens clipped at each optimizer step",
        Chart(lines=(Line(series=clipped),), x_label="step", percent=True),
    )
    made = history.by_step("optimizer_steps")
    yield "Optimizer steps of a step", Chart(lines=(Line(series=made),), x_label="step")


def _by_update(history: RunHistory, name: str) -> Series:
    """The n-th of N optimizer steps of step v lies at v − 1 + n/N."""
    points = [
        (float(event["step"]) - 1 + number / len(event["updates"]), float(update[name]))
        for event in history.steps
        for number, update in enumerate(event.get("updates", ()), start=1)
        if name in update
    ]
    return Series(tuple(x for x, _ in points), tuple(y for _, y in points))
