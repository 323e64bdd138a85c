"""The command `pipelinerl simulate`: its options and its output."""

from __future__ import annotations

import json as json_text
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.errors import UserError
from pipelinerl.plugins.simulation.planning import basis_of_runs, basis_of_table, json_of, lines_of, page_of, tried
from pipelinerl.plugins.simulation.prediction import grid, recommended
from pipelinerl.roles.role import Changes, Overrides, Recipe, joined


def simulate(
    recipe: Recipe,
    overrides: Overrides = None,
    changes: Changes = None,
    from_runs: Annotated[
        list[Path] | None,
        typer.Option(
            "--from", help="A finished, ideally synchronous run to calibrate from; a second one for contention."
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            help="A hardware table instead of a run: a file, or h100, h200 or v5p with a model size (h100:7b), "
            "computed from published figures. Sizes: 0.5b, 1.5b, 3b, 7b, 14b, 32b, 72b.",
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None, typer.Option("--sweep", help="section.key=value,value,…; several are combined.")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Distribution of answer lengths: fixed:TOKENS or heavy:MEDIAN,SIGMA.")
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each simulated run.")] = 100,
    engine_hour: Annotated[float | None, typer.Option(min=0, help="Price of an engine per hour.")] = None,
    trainer_hour: Annotated[float | None, typer.Option(min=0, help="Price of the trainer per hour.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots to this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print every figure as JSON.")] = False,
) -> None:
    """Simulate the recipe, once for each combination of swept values; exit status 2 if all are refused."""
    if bool(from_runs) == (hardware is not None):
        raise UserError(
            "timings are required: give either --from RUN (a finished run) or --hardware (a file, or such as h100:7b)"
        )
    basis = basis_of_runs(from_runs) if from_runs else basis_of_table(hardware or "")
    prices = replace(
        basis.hardware.prices,
        **{k: v for k, v in (("engine_hour", engine_hour), ("trainer_hour", trainer_hour)) if v is not None},
    )
    basis = replace(basis, hardware=replace(basis.hardware, prices=prices), length_words=lengths or basis.length_words)
    made = joined(overrides, changes)
    trials = [tried(recipe, made, swept, basis, steps=steps) for swept in grid(sweep or [])]
    best = recommended(trials) if sweep else None
    notes = [basis.verdict, *([f"recommended: {' '.join(best.changes)}"] if best is not None else [])]
    if html is not None:
        html.write_text(page_of(f"{recipe}, simulated", trials, notes))
    if json:
        typer.echo(json_text.dumps(json_of(trials, best=best, checks=basis.checks) | {"verdict": basis.verdict}))
        return
    for line in lines_of(trials):
        typer.echo(line)
    for run, errors in basis.checks.items():
        listed = ", ".join(f"{name} {error:+.0%}" for name, error in errors.items())
        typer.echo(f"simulated against measured, {run}: {listed}")
    for note in notes:
        typer.echo(note)
    if html is not None:
        typer.echo(str(html))
    if all(trial.refusal for trial in trials):
        raise typer.Exit(2)
