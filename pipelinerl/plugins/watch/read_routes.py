"""Routes that describe a run: `/api/run`, `/api/steps`, `/api/now`, `/api/compare`, `/api/timeline`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from fastapi import FastAPI, Query
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from pipelinerl.observability.run_history import OF_SAMPLER
from pipelinerl.observability.samples.record import SampleKind
from pipelinerl.observability.status import RunStatus
from pipelinerl.observability.usage import usage_by_role
from pipelinerl.plugins.watch.compare import differences, flat_keys
from pipelinerl.plugins.watch.page.now import overview
from pipelinerl.plugins.watch.page.step_table import StepRows, plain, plain_columns
from pipelinerl.plugins.watch.watched_run import (
    STATE_S,
    LooksOnly,
    Pages,
    RunNumber,
    StepNumber,
    WatchedRun,
    answer,
)

_MOST_METRICS: Final = 64
#: Seconds for which the controller's cached status is used; longer than the interval at which it is polled.
_STATUS_S: Final = STATE_S + 1.0
_SHOWN: Final = "reward,entropy,length_mean,grad_norm,staleness_mean,wait_s,step_s"

_Metrics = Annotated[str, Query(max_length=10_000)]
_Points = Annotated[int, Query(ge=2, le=4000)]
#: Type of a query parameter: a time in seconds since the run began.
_Moment = Annotated[float | None, Query(ge=0, le=1e12, allow_inf_nan=False)]


#: For each x axis of a comparison, the column of `StepRows.places`.
_PLACES: Final = {"step": "step", "seconds": "elapsed_s", "samples": "samples"}
Axis = Literal["step", "seconds", "samples"]


def add_reading(app: FastAPI, pages: Pages) -> None:
    """Add the routes that describe runs to `app`."""

    @app.get("/api/run")
    def run(looks_only: LooksOnly, number: RunNumber = 0) -> Response:
        watched = pages.of(number)
        pages.note_states()
        runs = [{"run": each.number, "name": each.name, "state": each.state} for each in pages.all]
        with watched.lock:
            return answer({"run": number, "runs": runs, **_run_facts(watched, looks_only)})

    @app.get("/api/steps")
    def steps(
        number: RunNumber = 0,
        metrics: _Metrics = _SHOWN,
        points: _Points = 1000,
        first: Annotated[int, Query(alias="from", ge=0, le=2**53)] = 0,
        last: Annotated[int, Query(alias="to", ge=0, le=2**53)] = 2**53,
        since: StepNumber = None,
    ) -> Response:
        run, names = pages.of(number), _names(metrics)
        return answer(_steps(run, names, points=points, first=first, last=last, since=since))

    @app.get("/api/now")
    def now(
        number: RunNumber = 0,
        window: Annotated[int, Query(ge=1, le=500)] = 20,
        metrics: _Metrics = "",
        points: _Points = 1000,
        since: StepNumber = None,
        marked: Annotated[int, Query(ge=0, le=2**53)] = 0,
    ) -> Response:
        names, run = _names(metrics), pages.of(number)
        status = None if run.view.state else run.steering.status(max_age_s=_STATUS_S)
        with run.lock:
            state = _now(run, status, window)
            if names:
                state["steps"] = _steps(run, names, points=points, since=since, marked=marked)
            return answer(state)

    @app.get("/api/compare")
    def compare(
        runs: Annotated[str, Query(max_length=200)] = "",
        metrics: _Metrics = "reward",
        x: Axis = "step",
        points: _Points = 500,
    ) -> Response:
        chosen = _chosen(pages, runs)
        overlays = [_overlaid(watched, _names(metrics), x, points) for watched in chosen]
        recipes = [watched.recipe() for watched in chosen]
        made = [watched.settings_made() for watched in chosen]
        return answer({"x": x, "runs": overlays, "differences": differences(recipes, made)})

    @app.get("/api/recipe")
    def recipe(number: RunNumber = 0) -> Response:
        watched = pages.of(number)
        made = dict(flat_keys(watched.settings_made()))
        rows = [{"path": path, "value": value, "made": path in made} for path, value in flat_keys(watched.recipe())]
        return answer({"rows": rows})

    @app.get("/api/timeline")
    def timeline(
        number: RunNumber = 0,
        first: Annotated[_Moment, Query(alias="from")] = None,
        last: Annotated[_Moment, Query(alias="to")] = None,
        points: Annotated[int, Query(ge=2, le=8000)] = 1500,
    ) -> Response:
        watched = pages.of(number)
        with watched.lock:
            window = watched.view.timeline.window(first, last, points=points)
        return answer(window)


def _now(run: WatchedRun, status: RunStatus | None, window: int) -> dict[str, Any]:
    view = run.view
    state = overview(view, window=window) | {"state": run.state, "waiting_for": ""}
    for incident in state["incidents"]:
        log = run.run_dir / "logs" / f"{incident.pop('engine', '')}.log"
        if log.is_file():
            incident["what"] += f"; its log: {log}"
    if status is not None:
        return state | {"waiting_for": status.waiting_for, "ledger": status.ledger, "fleet": status.fleet}
    fleet = {name: view.fleet.get(name) for name in ("tokens_per_s", "occupancy")}
    pause, engines = view.pauses_s[-1] if view.pauses_s else None, list(view.engines.values())
    return state | {"fleet": fleet | {"update_pause_s": pause, "engines": engines}}


def _run_facts(run: WatchedRun, looks_only: bool) -> dict[str, Any]:
    view = run.view
    recipe, names = run.recipe(), run.samples.names
    section, domains = recipe.get("run"), recipe.get("domains")
    declared = [each.get("name") for each in domains if isinstance(each, dict)] if isinstance(domains, list) else []
    obstacle = run.steering.obstacle(looks_only=looks_only) if not view.state else "the run is over"
    return {
        "name": run.name,
        "state": run.state,
        "trouble": run.trouble,
        "may_steer": not obstacle,
        "why_not": obstacle,
        "step": view.step,
        "total_steps": section.get("steps") if isinstance(section, dict) else None,
        "elapsed_s": view.newest.get("elapsed_s"),
        "started": view.started.get("time"),
        "last_event": view.newest.get("time"),
        "reason": str((view.ended or {}).get("reason", "")),
        "domains": sorted({*names["domains"], *(name for name in declared if isinstance(name, str))}),
        "tags": names["tags"],
        "evaluation_sets": list(view.evaluations),
        "metrics": view.steps.figures,
        "kinds": names["kinds"] or [str(SampleKind.TRAINED)],
        "recipe": recipe,
        "loading": run.loading,
        "samples": run.samples.count,
        "samples_dropped": run.samples.left_out,
    }


def _steps(
    run: WatchedRun,
    names: Sequence[str],
    *,
    points: int,
    first: int = 0,
    last: int = 2**53,
    since: int | None = None,
    marked: int = 0,
) -> dict[str, Any]:
    """Return the metrics of the steps after step `since`, and the marks in charts (such as knob changes).

    The first `marked` marks are left out, because the page already has them.
    """
    with run.lock:
        view, table = run.view, run.view.steps
        rows = table.rows(names, points=points, first=first, last=last, since=-1 if since is None else since)
        first_step, last_step = table.bounds
        return {
            "complete": "events" in run.loaded,
            "count": table.count,
            "first": first_step,
            "last": last_step,
            "marks": view.marks_after(marked),
            "marked": view.mark_count,
            "figures": len(table.figures),
            "each": rows.each,
            "x": {name: plain(column, 12) for name, column in rows.places.items()},
            "y": _columns(rows),
        }


def _names(metrics: str) -> list[str]:
    """Parse a comma-separated list of metric names in a query; `%2C` stands for a comma within a name."""
    names = [name.replace("%2C", ",") for name in metrics.split(",") if name]
    if len(names) > _MOST_METRICS:
        raise HTTPException(422, f"metrics must be at most {_MOST_METRICS} names, got {len(names)}")
    return names


def _columns(rows: StepRows) -> dict[str, dict[str, list[float | None]]]:
    parts = {"mean": plain_columns(rows.means)}
    if rows.each > 1:
        parts |= {"low": plain_columns(rows.lows), "high": plain_columns(rows.highs)}
    return {name: {part: column[name] for part, column in parts.items()} for name in rows.means}


def _chosen(pages: Pages, runs: str) -> list[WatchedRun]:
    if not runs:
        return list(pages.all)
    numbers = runs.split(",")
    if not all(number.isdigit() and len(number) < 6 for number in numbers):
        raise HTTPException(422, f"runs must be numbers of runs with commas between them, got {runs!r}")
    return [pages.of(int(number)) for number in dict.fromkeys(numbers)]


def _summary(watched: WatchedRun) -> dict[str, Any]:
    """Return the figures of a run that a list of runs shows."""
    view = watched.view
    last = view.recent[-1] if view.recent else {}
    return {
        "state": watched.state,
        "started": view.started.get("time"),
        "elapsed_s": view.newest.get("elapsed_s"),
        "step": view.step,
        "reward": last.get("reward"),
        "accuracies": {name: event.get("accuracy") for name, event in view.evaluations.items()},
        "usage": {role: msgspec.to_builtins(usage) for role, usage in usage_by_role(watched.run_dir).items()},
    }


def _held_out(watched: WatchedRun, rows: StepRows, axis: Axis) -> dict[str, dict[str, list[Any]]]:
    """Return the accuracies of each evaluation set over the axis; samples are interpolated between steps."""
    curves: dict[str, dict[str, list[Any]]] = {}
    for mark in watched.view.held_out:
        step, accuracy = mark["step"], mark["accuracy"]
        if not isinstance(accuracy, int | float) or not isinstance(step, int):
            continue
        place: Any = mark["elapsed_s"] if axis == "seconds" else step
        if axis == "samples":
            steps, samples = rows.places["step"], rows.places["samples"]
            place = float(np.interp(step, [0, *steps], [0, *samples]))
        if isinstance(place, int | float):
            curve = curves.setdefault(mark["set"], {"x": [], "y": []})
            curve["x"].append(place)
            curve["y"].append(accuracy)
    return curves


def _overlaid(watched: WatchedRun, metrics: Sequence[str], axis: Axis, points: int) -> dict[str, Any]:
    with watched.lock:
        rows = watched.view.steps.rows(metrics, points=points)
        facts = {**_summary(watched), "held_out": _held_out(watched, rows, axis)}
    columns, x = _columns(rows), rows.places[_PLACES[axis]]
    # A reward stands where its version was the newest, not at the step that trained on it.
    ends = np.array([[0.0, *rows.places["step"]], [0.0, *x]])
    by_version = plain(np.interp(rows.places["sampled_version"], *ends), 12)
    parts = {part: {name: column.get(part) for name, column in columns.items()} for part in ("low", "high")}
    return {
        "run": watched.number,
        "name": watched.name,
        **facts,
        "x": plain(x, 12),
        "x_of": {name: by_version for name in columns if name.rpartition("/")[2] in OF_SAMPLER},
        "y": {name: column["mean"] for name, column in columns.items()},
        **parts,
    }
