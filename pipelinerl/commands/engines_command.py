"""The commands `pipelinerl engines …`, which `cli` registers: the fleet of a live run, seen and changed.

`add`, `drain`, `remove` and `swap` wait until it has happened, and say what did; with `--no-wait` they only ask for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelinerl import registry
from pipelinerl.errors import UserError

engines_app = typer.Typer(help="List the engines of a live run, or change them.", no_args_is_help=True)

Run = Annotated[
    str,
    typer.Argument(
        help="Directory of the run, such as runs/tiny; or its controller's URL, with the token in $PIPELINERL_TOKEN."
    ),
]
Which = Annotated[str, typer.Argument(help="The engine's name or URL, as `list` shows it.")]
Type = Annotated[str | None, typer.Option("--type", help="Start one of this type: torch, vllm, jax, bigram …")]
Patience = Annotated[float, typer.Option(help="Seconds for what it has; what remains then is handed over.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it has happened.")]


@engines_app.command("list")
def list_(run: Run) -> None:
    """Name, type, lifecycle, loaded version, load and last error of each engine."""
    from pipelinerl.commands.engines import table
    from pipelinerl.commands.remote import controller_of

    with controller_of(run) as controller:
        fleet = controller.engines()
    for line in table(fleet):
        typer.echo(line)


@engines_app.command()
def add(
    run: Run,
    url: Annotated[str | None, typer.Argument(help="A running engine, such as http://127.0.0.1:8001.")] = None,
    type: Type = None,
    count: Annotated[int, typer.Option(help="How many to start.")] = 1,
    wait: Wait = True,
) -> None:
    """Take a running engine into the fleet, or start new ones; they serve once they have proven their weights."""
    from pipelinerl.commands.engines import joined, line
    from pipelinerl.commands.remote import controller_of

    if (url is None) == (type is None):
        raise UserError("name a running engine's URL, or a --type to start; one of the two")
    if type is not None:
        registry.known("--type", registry.ENGINES, type)
    with controller_of(run) as controller:
        if url is not None:
            controller.register_engine(url)
            wanted: tuple[str, ...] = (url.rstrip("/"),)
        else:
            wanted = controller.request_engines(str(type), count=count)
        if not wait:
            typer.echo("asked for " + ", ".join(wanted))
            return
        for which in wanted:
            typer.echo(line(joined(controller, which, logs=_logs(run))))


@engines_app.command()
def drain(run: Run, engine: Which, patience: Patience = 60.0, wait: Wait = True) -> None:
    """Give an engine no more work, and take it out once it has ended what it has."""
    from pipelinerl.commands.engines import gone, line
    from pipelinerl.commands.remote import controller_of

    with controller_of(run) as controller:
        controller.drain_engine(engine, grace_s=patience)
        if wait:
            typer.echo(line(gone(controller, engine, within_s=patience + 30.0)))


@engines_app.command()
def remove(run: Run, engine: Which) -> None:
    """Take an engine out at once; what it has is sampled anew elsewhere."""
    from pipelinerl.commands.remote import controller_of

    with controller_of(run) as controller:
        controller.remove_engine(engine)
    typer.echo(f"{engine} is out")


@engines_app.command()
def swap(run: Run, engine: Which, type: Type = None, patience: Patience = 60.0, wait: Wait = True) -> None:
    """Replace an engine: start another, and drain the old one when the new one has proven its weights."""
    from pipelinerl.commands.engines import gone, joined, line
    from pipelinerl.commands.remote import controller_of

    if type is None:
        raise UserError("say with --type what the engine is to be replaced by")
    registry.known("--type", registry.ENGINES, type)
    with controller_of(run) as controller:
        (name,) = controller.request_engines(type, replaces=engine, grace_s=patience)
        if not wait:
            typer.echo(f"asked for {name}")
            return
        typer.echo(line(joined(controller, name, logs=_logs(run))))
        typer.echo(line(gone(controller, engine, within_s=patience + 30.0)))


def _logs(run: str) -> Path:
    """Where to look for what an engine wrote: on the run's machine, below its directory."""
    from pipelinerl.commands.remote import is_url

    return Path("logs") if is_url(run) else Path(run) / "logs"
