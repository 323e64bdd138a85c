"""The commands `eval` and `prefilter`: their options and output. Heavy imports are delayed until a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.config import recipe as recipes
from pipelinerl.roles.role import Changes


def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="RUN|MODEL|URL", help="Model to evaluate; a URL may be any OpenAI server.")
    ],
    recipe: Annotated[
        str | None, typer.Option(help="Recipe with the evaluation sets and the engine (default: the run's).")
    ] = None,
    changes: Changes = None,
    checkpoint: Annotated[str, typer.Option(help="Checkpoint, such as step-000050 (default: the newest).")] = "",
    of_set: Annotated[
        str, typer.Option("--evaluation", help="Evaluation set of the recipe (default: the first).")
    ] = "",
    problems: Annotated[int | None, typer.Option(min=1, help="Number of held-out problems.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Samples per problem.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = None,
    split: Annotated[str | None, typer.Option(help="Split: held_out or validation.")] = None,
    model: Annotated[str, typer.Option(help="Model of the server at the URL (default: its first).")] = "",
    token_file: Annotated[
        Path | None, typer.Option(help="Bearer token of the server at the URL (default: $PIPELINERL_TOKEN).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File of answers; a repeated call skips the problems answered there.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print every figure as JSON.")] = False,
) -> None:
    """Evaluate a run's checkpoint, a model directory or a server at a URL: accuracy, pass@k, maj@k, lengths."""
    from rich.console import Console

    from pipelinerl.plugins.evaluation import evaluate as evaluation
    from pipelinerl.plugins.evaluation.respondents import recipe_of, target_of
    from pipelinerl.roles.process import read_token

    overrides = {"problems": problems, "samples": samples, "temperature": temperature, "split": split}
    of = target_of(target, checkpoint=checkpoint)
    config = evaluation.with_one_evaluation(recipes.load(recipe_of(of, recipe), changes or []), of_set, overrides)
    report = evaluation.evaluate(
        of, config, token=read_token(token_file), model=model, console=Console(stderr=True), out=out
    )
    evaluation.show(report, Console(), as_json=json)


def prefilter(
    target: Annotated[
        str, typer.Argument(metavar="MODEL|RUN|URL", help="Model to evaluate; a URL may be any OpenAI server.")
    ],
    out: Annotated[Path, typer.Option(help="Directory for answers and data sets; an interrupted call resumes.")],
    recipe: Annotated[str | None, typer.Option(help="Recipe with the domains (default: the run's).")] = None,
    changes: Changes = None,
    checkpoint: Annotated[str, typer.Option(help="Checkpoint of the run (default: the newest).")] = "",
    problems: Annotated[int, typer.Option(min=1, help="Maximum number of training problems.")] = 1000,
    samples: Annotated[int, typer.Option(min=1, help="Samples per problem.")] = 8,
    keep: Annotated[str, typer.Option(help="Pass rates of the problems to keep.")] = "0.1..0.9",
    model: Annotated[str, typer.Option(help="Model of the server at the URL (default: its first).")] = "",
    token_file: Annotated[
        Path | None, typer.Option(help="Bearer token of the server at the URL (default: $PIPELINERL_TOKEN).")
    ] = None,
) -> None:
    """Measure how often a model solves each training problem, and keep those within a band of pass rates."""
    from rich.console import Console

    from pipelinerl.plugins.evaluation import prefilter as prefiltering
    from pipelinerl.plugins.evaluation.respondents import recipe_of, target_of
    from pipelinerl.roles.process import read_token

    of, band = target_of(target, checkpoint=checkpoint), prefiltering.Band.parse(keep)
    report = prefiltering.prefilter(
        of,
        recipes.load(recipe_of(of, recipe), changes or []),
        out=out,
        keep=band,
        problems=problems,
        samples=samples,
        token=read_token(token_file),
        model=model,
        console=Console(stderr=True),
    )
    typer.echo(f"{report.problems} problems, {report.asked} evaluated now, {report.unanswered} without an answer")
    typer.echo(f"mean pass rate {report.mean:.1%}; kept {sum(report.kept.values())} within {keep}")
    for domain, path in report.files.items():
        typer.echo(f"{report.kept[domain]:>8}  {path}")
