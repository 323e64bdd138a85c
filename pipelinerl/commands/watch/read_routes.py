"""Routes that tell what a run is and was: `/api/run`, `/api/steps`, `/api/now`, `/api/compare`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Final

import msgspec
from fastapi import FastAPI, Query
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from pipelinerl.commands.watch.pages import Pages, RunNumber, StepNumber, Watched, answer
from pipelinerl.observability.page.now import overview
from pipelinerl.observability.page.step_table import StepRows, plain
from pipelinerl.observability.samples.record import SampleKind

_MOST_METRICS: Final = 64
_SHOWN: Final = "reward,entropy,length_mean,grad_norm,staleness_mean,wait_s,step_s"

_Metrics = Annotated[str, Query(max_length=10_000)]
_Points = Annotated[int, Query(ge=2, le=4000)]


class Axis(StrEnum):
    """What runs are laid over each other by."""

    STEP = "step"
    SECONDS = "seconds"
    SAMPLES = "samples"


_PLACES: Final = {Axis.STEP: "step", Axis.SECONDS: "elapsed_s", Axis.SAMPLES: "samples"}


def add_reading(app: FastAPI, pages: Pages) -> None:
    """Add them."""

    @app.get("/api/run")
    def run(number: RunNumber = 0) -> Response:
        watched = pages.of(number)
        pages.note_states()
        runs = [{"run": each.run.number, "name": each.run.name, "state": each.run.state} for each in pages.all]
        with watched.run.lock:
            return answer({"run": number, "runs": runs, **_told(watched)})

    @app.get("/api/steps")
    def steps(
        number: RunNumber = 0,
        metrics: _Metrics = _SHOWN,
        points: _Points = 1000,
        first: Annotated[int, Query(alias="from", ge=0, le=2**53)] = 0,
        last: Annotated[int, Query(alias="to", ge=0, le=2**53)] = 2**53,
        since: StepNumber = None,
    ) -> Response:
        watched = pages.of(number).run
        with watched.lock:
            table, bounds = watched.view.steps, watched.view.steps.bounds
            rows = table.rows(
                _names(metrics), points=points, first=first, last=last, since=-1 if since is None else since
            )
            count, marks = table.count, list(watched.view.marks)
            complete = "events" in watched.loaded
        places = {name: plain(column, 12) for name, column in rows.places.items()}
        told = {"complete": complete, "count": count, "first": bounds[0], "last": bounds[1], "each": rows.each}
        return answer({**told, "x": places, "y": _columns(rows), "marks": marks})

    @app.get("/api/now")
    def now(number: RunNumber = 0, window: Annotated[int, Query(ge=1, le=500)] = 20) -> Response:
        watched = pages.of(number)
        status = None if watched.run.view.state else watched.steering.status()
        with watched.run.lock:
            told = overview(watched.run.view, window=window) | {"state": watched.run.state, "waiting_for": ""}
            engines = [dict(engine) for engine in watched.run.view.engines.values()]
            fleet = {name: watched.run.view.fleet.get(name) for name in ("tokens_per_s", "occupancy")}
            pauses = watched.run.view.pauses_s
            told["fleet"] = fleet | {"update_pause_s": pauses[-1] if pauses else None, "engines": engines}
        if status is not None:
            told |= {"waiting_for": status.waiting_for, "ledger": status.ledger, "fleet": status.fleet}
        return answer(told)

    @app.get("/api/compare")
    def compare(
        runs: Annotated[str, Query(max_length=200)] = "",
        metrics: _Metrics = "reward",
        x: Axis = Axis.STEP,
        points: _Points = 500,
    ) -> Response:
        chosen = _chosen(pages, runs)
        told = [_overlaid(watched, _names(metrics), x, points) for watched in chosen]
        recipes = [watched.run.recipe() for watched in chosen]
        return answer({"x": x, "runs": told, "differences": differences(recipes)})


def _told(watched: Watched) -> dict[str, Any]:
    run, view = watched.run, watched.run.view
    recipe, names = run.recipe(), run.samples.names
    section, domains = recipe.get("run"), recipe.get("domains")
    declared = [each.get("name") for each in domains if isinstance(each, dict)] if isinstance(domains, list) else []
    obstacle = watched.steering.obstacle() if not view.state else "the run is over"
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


def _names(metrics: str) -> list[str]:
    """The figures that a question names; in a name, `%2C` stands for a comma."""
    names = [name.replace("%2C", ",") for name in metrics.split(",") if name]
    if len(names) > _MOST_METRICS:
        raise HTTPException(422, f"metrics must be at most {_MOST_METRICS} names, got {len(names)}")
    return names


def _columns(rows: StepRows) -> dict[str, dict[str, list[float | None]]]:
    told = {name: {"mean": plain(rows.means[name])} for name in rows.means}
    if rows.each > 1:
        for name, column in told.items():
            column |= {"low": plain(rows.lows[name]), "high": plain(rows.highs[name])}
    return told


def _chosen(pages: Pages, runs: str) -> list[Watched]:
    if not runs:
        return list(pages.all)
    numbers = runs.split(",")
    if not all(number.isdigit() and len(number) < 6 for number in numbers):
        raise HTTPException(422, f"runs must be numbers of runs with commas between them, got {runs!r}")
    return [pages.of(int(number)) for number in dict.fromkeys(numbers)]


def _overlaid(watched: Watched, metrics: Sequence[str], axis: Axis, points: int) -> dict[str, Any]:
    with watched.run.lock:
        rows = watched.run.view.steps.rows(metrics, points=points)
    columns = _columns(rows)
    parts = {part: {name: column.get(part) for name, column in columns.items()} for part in ("low", "high")}
    return {
        "run": watched.run.number,
        "name": watched.run.name,
        "x": plain(rows.places[_PLACES[axis]], 12),
        "y": {name: column["mean"] for name, column in columns.items()},
        **parts,
    }


def differences(recipes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Keys of which not all recipes have the same value, each with every recipe's, None where it has none."""
    flat = [dict(_flat(recipe, "")) for recipe in recipes]
    paths = sorted({path for each in flat for path in each})
    return [
        {"path": path, "values": [each.get(path) for each in flat]}
        for path in paths
        if len({msgspec.json.encode(each.get(path)) for each in flat}) > 1
    ]


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Values by dotted path; members of a list that have names go by them."""
    if isinstance(value, list) and value and all(isinstance(each, dict) and "name" in each for each in value):
        value = {str(each["name"]): each for each in value}
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, each in value.items():
        yield from _flat(each, f"{path}.{name}" if path else name)
