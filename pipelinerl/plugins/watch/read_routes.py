"""Routes that read a run: `/api/run`, `/api/steps`, `/api/now`, `/api/compare`, `/api/timeline`; its samples and their
tokens: `/api/samples`, `/api/samples/{group}`, `/api/tokens/{group}/{sample}`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from fastapi import FastAPI, Path, Query
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from pipelinerl.numerics.causes import Cause
from pipelinerl.observability.events import flat_keys
from pipelinerl.observability.run_history import OF_SAMPLER
from pipelinerl.observability.samples import AnswerRecord, AnswerTokens, SampleGroup, SampleKind, shortened
from pipelinerl.observability.status import RunStatus
from pipelinerl.observability.usage import usage_by_role
from pipelinerl.plugins.watch.compare import differences
from pipelinerl.plugins.watch.page.now import overview
from pipelinerl.plugins.watch.page.sample_index import SampleFilter, SamplePlace, answers_of
from pipelinerl.plugins.watch.page.step_table import StepRows, plain, plain_columns
from pipelinerl.plugins.watch.watched_run import (
    STATE_S,
    LooksOnly,
    Name,
    Pages,
    RunNumber,
    StepNumber,
    WatchedRun,
    answer,
)
from pipelinerl.system.http_service import refusal

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
        numbers = list(dict.fromkeys(runs.split(","))) if runs else []
        if not all(number.isdigit() and len(number) < 6 for number in numbers):
            raise HTTPException(422, f"runs must be numbers of runs with commas between them, got {runs!r}")
        chosen = [pages.of(int(number)) for number in numbers] or pages.all
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
    """Return the metrics of the steps after `since`, and the charts' marks but the first `marked`."""
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
        view, usage = watched.view, usage_by_role(watched.run_dir)
        last = view.recent[-1] if view.recent else {}
        facts = {
            "state": watched.state,
            "started": view.started.get("time"),
            "elapsed_s": view.newest.get("elapsed_s"),
            "step": view.step,
            "reward": last.get("reward"),
            "accuracies": {name: event.get("accuracy") for name, event in view.evaluations.items()},
            "usage": {role: msgspec.to_builtins(each) for role, each in usage.items()},
            "held_out": _held_out(watched, rows, axis),
        }
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


# --- samples ----------------------------------------------------------------------------------------------------------

_BRIEF: Final = 200
#: Maximum number of characters shown of each prompt in a list of samples.
_PART: Final = 60
_WORD_AT_END: Final = re.compile(r"\w+\Z")
_WORD_AT_START: Final = re.compile(r"\A\w+")
_GONE: Final = (
    "this sample is not in the log, or was removed: samples.max_bytes limits the log, and the oldest go first"
)
_NO_TOKENS: Final = "no tokens were recorded for this sample: it is from an evaluation or an older run"

_Group = Annotated[str, Path(max_length=64)]


def add_samples(app: FastAPI, pages: Pages) -> None:
    """Add the routes of lists of samples, of one group, and of one sample's tokens."""

    @app.get("/api/samples")
    def samples(
        number: RunNumber = 0,
        kind: SampleKind | Literal["any"] = SampleKind.TRAINED,
        sort: Literal["time", "step", "reward", "advantage", "length", "staleness"] = "time",
        order: Literal["asc", "desc"] = "desc",
        domain: Name = None,
        tag: Name = None,
        step: StepNumber = None,
        step_to: StepNumber = None,
        signal: Literal["with", "without"] | None = None,  # of groups: whether their rewards differ
        evaluation: Annotated[str | None, Query(alias="set", max_length=500)] = None,
        finish: Name = None,
        outcome: Name = None,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
        after: Annotated[str, Query(max_length=100)] = "",
    ) -> Response:
        criteria = SampleFilter(
            kind=None if kind == "any" else kind,
            domain=domain or None,
            tag=tag or None,
            step=step,
            step_to=step_to,
            evaluation=evaluation or None,
            finish_reason=finish or None,
            outcome=outcome or None,
            signal=None if signal is None else signal == "with",
            sort=sort,
            descending=order == "desc",
            limit=limit,
            after=_place(after),
        )
        run = pages.of(number)
        with run.lock:
            choice = run.samples.choose(criteria)
            members = list(answers_of(choice, run.samples))
            complete = not run.samples.unread_bytes
        rest = None if choice.after is None else "{!r}:{:016x}:{}".format(*choice.after)
        prompts: dict[str, list[str]] = {}
        for _, each in members:
            prompts.setdefault(each.domain, []).append(each.prompt)
        parts = {domain: dict(zip(of, differing_parts(of, _PART), strict=True)) for domain, of in prompts.items()}
        rows = [_row(place, each) | {"prompt_part": parts[each.domain][each.prompt]} for place, each in members]
        return answer({"complete": complete, "matched": choice.matched, "after": rest, "samples": rows})

    @app.get("/api/samples/{group}")
    def side_by_side(group: _Group, number: RunNumber = 0) -> Response:
        stored, signal = _group(pages.of(number), group)
        if stored is None:
            return refusal(404, _GONE, code="sample_gone", param="group")
        fields = msgspec.to_builtins(msgspec.structs.replace(stored, prompt_tokens=None, answers=()))
        answers = [_answer(at, each) for at, each in enumerate(stored.answers)]
        whole = {"tags": [], "problem_id": "", "ground_truth": "", "why": "", "evaluation": "", "filtered": {}}
        return answer({**whole, **fields, "group": group, "signal": signal, "answers": answers})

    @app.get("/api/tokens/{group}/{sample}")
    def tokens(group: _Group, sample: Annotated[int, Path(ge=0, le=2**20)], number: RunNumber = 0) -> Response:
        stored, _ = _group(pages.of(number), group)
        if stored is None or sample >= len(stored.answers):
            return refusal(404, _GONE, code="sample_gone", param="group")
        columns = stored.answers[sample].tokens
        if columns is None:
            return refusal(404, _NO_TOKENS, code="no_tokens")
        return answer(
            {"group": group, "sample": sample, "step": stored.step, **_token_columns(stored, sample, columns)}
        )


def _group(run: WatchedRun, name: str) -> tuple[SampleGroup | None, bool]:
    with run.lock:
        stored = run.samples.group(name)
        return stored, stored is not None and run.samples.has_signal(name)


def _place(after: str) -> tuple[float, int, int] | None:
    if not after:
        return None
    try:
        value, key, number = after.split(":")
        place = float(value), int(key, 16), int(number)
    except ValueError:
        place = math.nan, 0, 0
    if math.isnan(place[0]) or not 0 <= place[1] < 2**64 or not 0 <= place[2] < 2**31:
        raise HTTPException(422, "after must be the `after` of an earlier response")
    return place


def _row(place: SamplePlace, group: SampleGroup) -> dict[str, Any]:
    each = group.answers[place.number]
    return {
        "group": place.name,
        "kind": group.kind,
        "step": group.step,
        "time": group.time,
        "domain": group.domain,
        "tags": group.tags,
        "problem_id": group.problem_id,
        "signal": place.signal,
        "prompt": shortened(group.prompt, _BRIEF),
        **_answer(place.number, each),
        "text": shortened(each.text, _BRIEF),
        "versions": each.spans,
    }


def differing_parts(texts: Sequence[str], most: int) -> list[str]:
    """Return texts without their common start and end, cut to about `most` characters; of equal texts, the end."""
    if len(set(texts)) < 2:
        return [text if len(text) <= most else f"… {text[-most:]}" for text in texts]
    begin = _WORD_AT_END.sub("", _shared_start(texts))
    rests = [text[len(begin) :] for text in texts]
    end = _WORD_AT_START.sub("", _shared_start([rest[::-1] for rest in rests])[::-1])
    parts = [shortened(rest[: len(rest) - len(end)].strip(), most) for rest in rests]
    return [f"{'… ' if begin.strip() else ''}{part}{' …' if end.strip() else ''}" for part in parts]


def _shared_start(texts: Sequence[str]) -> str:
    first, last = min(texts, default=""), max(texts, default="")
    return first[: next((at for at, each in enumerate(first) if last[at : at + 1] != each), len(first))]


def _answer(number: int, each: AnswerRecord) -> dict[str, Any]:
    fields = {name: getattr(each, name) for name in each.__struct_fields__ if name != "tokens"}
    turns = [msgspec.structs.asdict(turn) for turn in each.turns]
    return {"sample": number, **fields, "turns": turns, "has_tokens": each.tokens is not None}


def _token_columns(group: SampleGroup, number: int, answer: AnswerTokens) -> dict[str, Any]:
    """Return lists (ids, texts, log-probs, …) with one entry per token: the prompt's tokens, then the answer's."""
    prompt, tokens = group.prompt_tokens, answer.tokens
    ids = [*(prompt.ids if prompt else ()), *tokens.ids]
    texts = [*(prompt.texts if prompt else ()), *tokens.texts]
    before = len(ids) - len(tokens.ids)
    trained, held = group.answers[number].trained, group.step - 1

    def column(values: tuple[Any, ...]) -> list[Any] | None:
        return [None] * before + list(values) if values else None

    sampled = [False] * before + [version is not None for version in answer.versions]
    deltas = column(answer.deltas)
    logprobs = column(answer.logprobs)
    ours = [None if a is None or b is None else a + b for a, b in zip(logprobs or (), deltas or (), strict=False)]
    left_out = [each for each in (prompt, tokens) if each is not None and each.left_out]
    return {
        "held_version": held,
        "count": len(ids),
        "prompt": before,
        "left_out": sum(each.left_out for each in left_out),
        "left_out_at": None if not left_out else left_out[0].at + (before if left_out[0] is tokens else 0),
        "id": ids,
        "text": texts,
        "sampled": sampled,
        "mask": [each and trained for each in sampled],
        "version": column(answer.versions),
        "logprob": logprobs,
        "trainer_logprob": ours or None,
        "delta": deltas,
        "cause": column(causes_of(answer.versions, held=held)) if deltas else None,
        "advantage": column(answer.advantages),
        "entropy": column(answer.entropies),
        "special": None,
    }


def causes_of(versions: tuple[int | None, ...], *, held: int) -> tuple[Cause | None, ...]:
    """Return for each token why the trainer's log-prob differs from the sampler's; None for tokens not sampled.

    As in `numerics.causes`, the cause depends on the version that sampled the token, the version that sampled the first
    token of its turn, and the version `held` by the trainer.
    """
    causes: list[Cause | None] = []
    first: int | None = None
    for version in versions:
        if version is None:
            causes.append(None)
            first = None
            continue
        first = version if first is None else first
        own = Cause.NUMERICS if first == held else Cause.CACHE
        causes.append(own if version == held else Cause.STALENESS)
    return tuple(causes)
