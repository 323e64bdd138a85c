"""The commands `pipelinerl engines …`: the fleet of a live run, seen and changed.

`add`, `drain`, `remove` and `swap` wait until it has happened, and say what did; with `--no-wait` they only ask for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pipelinerl import registry
from pipelinerl.errors import DeadlineError, UserError
from pipelinerl.observability.status import EngineStatus, FleetStatus
from pipelinerl.system.files import working_directory
from pipelinerl.system.references import anchored

if TYPE_CHECKING:  # it imports an HTTP library, for which `pipelinerl --help` need not wait
    from pipelinerl.controller.client import ControllerClient

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

_POLL_S: Final = 0.2
#: An engine must have joined by then: it loads a model, and waits for a publication.
_JOIN_S: Final = 300.0


@engines_app.command("list")
def list_(run: Run) -> None:
    """Name, type, lifecycle, loaded version, load and last error of each engine; and how a client reaches them."""
    from pipelinerl.commands.engine_access import access_line
    from pipelinerl.commands.remote import controller_of

    with controller_of(run) as controller:
        fleet = controller.engines()
    for line in table(fleet):
        typer.echo(line)
    typer.echo(access_line(run, fleet.engines))


@engines_app.command()
def client(run: Run) -> None:
    """Print a Python program that asks an engine of the run through OpenAI's client."""
    from pipelinerl.commands.engine_access import client_snippet
    from pipelinerl.commands.remote import controller_of

    with controller_of(run) as controller:
        fleet = controller.engines()
    typer.echo(client_snippet(run, fleet.engines))


@engines_app.command()
def add(
    run: Run,
    url: Annotated[str | None, typer.Argument(help="A running engine, such as http://127.0.0.1:8001.")] = None,
    type: Type = None,
    count: Annotated[int, typer.Option(help="How many to start.")] = 1,
    wait: Wait = True,
) -> None:
    """Take a running engine into the fleet, or start new ones; they serve once they have proven their weights."""
    from pipelinerl.commands.remote import controller_of

    if (url is None) == (type is None):
        raise UserError("name a running engine's URL, or a --type to start; one of the two")
    if type is not None:
        type = _known(type)
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
    from pipelinerl.commands.remote import controller_of

    if type is None:
        raise UserError("say with --type what the engine is to be replaced by")
    type = _known(type)
    with controller_of(run) as controller:
        (name,) = controller.request_engines(type, replaces=engine, grace_s=patience)
        if not wait:
            typer.echo(f"asked for {name}")
            return
        typer.echo(line(joined(controller, name, logs=_logs(run))))
        typer.echo(line(gone(controller, engine, within_s=patience + 30.0)))


@engines_app.command()
def elastic(
    run: Annotated[Path, typer.Argument(help="Directory of the run, live or over.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value …, such as elastic.waiting=0.3", show_default=False)
    ] = None,
) -> None:
    """When a run's figures would have had engines come or go, by its `elastic` section; does nothing (a dry run)."""
    from pipelinerl.commands.elastic_trial import show

    for line_ in show(run, overrides or ()):
        typer.echo(line_)


def _known(type: str) -> str:
    """The engine's type, with an absolute path if it is a file of the user's."""
    registry.known("--type", registry.ENGINES, type := anchored(type, working_directory()))
    return type


def _logs(run: str) -> Path:
    """Where to look for what an engine wrote: on the run's machine, below its directory."""
    from pipelinerl.commands.remote import is_url

    return Path("logs") if is_url(run) else Path(run) / "logs"


def table(fleet: FleetStatus) -> list[str]:
    """A line for each engine, under a heading, and one for each that has not come yet."""
    names = {engine.name for engine in fleet.engines}
    heading = _row("name", "type", "lifecycle", "version", "running", "waiting", "tokens/s", "url")
    waiting = [
        _row(h.name, h.type, "requested", "-", "-", "-", "-", "") for h in fleet.requested if h.name not in names
    ]
    return [heading, *map(line, fleet.engines), *waiting]


def line(engine: EngineStatus) -> str:
    """One engine as a row of the table."""
    row = _row(
        engine.name or "-",
        engine.type or "-",
        engine.state,
        str(engine.version),
        str(engine.running),
        str(engine.waiting),
        f"{engine.tokens_per_s:.0f}",
        engine.url,
    )
    return f"{row}  {engine.last_error}".rstrip()


def joined(controller: ControllerClient, which: str, *, logs: Path, within_s: float = _JOIN_S) -> EngineStatus:
    """Wait until the engine serves.

    Raises:
        UserError: it was expelled, or cannot be had; DeadlineError: it has not come in time.
    """
    engine = _until(
        controller, which, lambda engine: engine.serves or engine.state == "expelled", within_s, "serve", logs
    )
    if engine.state == "expelled":
        raise UserError(f"{which} was expelled: {engine.last_error}")
    return engine


def gone(controller: ControllerClient, which: str, *, within_s: float) -> EngineStatus:
    """Wait until the engine is out; raises DeadlineError when it is not in time."""
    return _until(controller, which, lambda engine: engine.state == "expelled", within_s, "be out", None)


def _until(
    controller: ControllerClient,
    which: str,
    reached: Callable[[EngineStatus], bool],
    within_s: float,
    what: str,
    logs: Path | None,
) -> EngineStatus:
    from pipelinerl.controller.state.fleet import base_url

    hint = "" if logs is None else f"; see {logs}"
    deadline = time.monotonic() + within_s
    lifecycle = "not heard of"
    while time.monotonic() < deadline:
        fleet = controller.engines()
        for engine in fleet.engines:
            if base_url(which) in (engine.url, engine.name):
                lifecycle = f"{engine.state} {engine.last_error}".strip()
                if reached(engine):
                    return engine
        if lifecycle == "not heard of" and which in fleet.to_stop:
            raise UserError(f"{which} did not come, and the run goes on without it{_last_word(which, logs)}{hint}")
        time.sleep(_POLL_S)
    raise DeadlineError(f"{which} should {what} within {within_s:g} s, and is {lifecycle}{hint}")


def _last_word(which: str, logs: Path | None) -> str:
    """The sentence with which its log ends, if it does, and is here: what a user can mend."""
    log = None if logs is None else logs / f"{which}.log"
    lines = log.read_text(errors="replace").splitlines() if log is not None and log.is_file() else []
    sentence = lines[-1].removeprefix("pipelinerl: ") if lines else ""
    return f": {sentence}" if lines and sentence != lines[-1] else ""


def _row(name: str, type: str, lifecycle: str, version: str, running: str, waiting: str, rate: str, url: str) -> str:
    counts = f"{version:>8}{running:>9}{waiting:>9}{rate:>10}"
    return f"{name:<12}{type:<10}{lifecycle:<10}{counts}  {url}".rstrip()
