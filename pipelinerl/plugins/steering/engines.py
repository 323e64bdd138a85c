"""The commands `pipelinerl engines …`: list and change the engines of a live run.

`add`, `drain` and `swap` wait for the result and report it; with `--no-wait` they only send the request. `remove` takes
effect immediately. The run's launcher starts and stops engine processes. If the run has no launcher, because its
services were started manually, `add` and `swap` print the command line that starts the engine, and wait until the user
has started it.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pipelinerl import registry
from pipelinerl.errors import DeadlineError, UserError
from pipelinerl.observability.status import EngineStatus, FleetStatus
from pipelinerl.roles.role import Overrides, Run
from pipelinerl.system.files import working_directory
from pipelinerl.system.references import anchored

if TYPE_CHECKING:  # not imported at run time, because it loads an HTTP library, which would slow `pipelinerl --help`
    from pipelinerl.controller.client import ControllerClient

engines_app = typer.Typer(help="List the engines of a live run, or change them.", no_args_is_help=True)

Which = Annotated[str, typer.Argument(help="The engine's name or URL, as `list` shows it.")]
Type = Annotated[str | None, typer.Option("--type", help="Type of the engine to start: torch, vllm, jax, bigram …")]
Timeout = Annotated[float, typer.Option(help="Seconds for its running requests; the rest is handed over.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the result.")]

_POLL_S: Final = 0.2
#: States of an engine that is out of the run.
_OUT: Final = ("expelled", "left")
#: Format of a row of the table: name, type, lifecycle, version, running, waiting, tokens/s, URL.
_ROW: Final = "{:<12}{:<10}{:<10}{:>8}{:>9}{:>9}{:>10}  {}"
#: Seconds within which an engine must join the run: it must load its model and receive a publication of weights.
_JOIN_S: Final = 300.0


@engines_app.command("list")
def list_(run: Run) -> None:
    """List each engine's name, type, lifecycle, version, load and last error, and how clients can reach the engines."""
    from pipelinerl.commands.remote import access_line, controller_of

    with controller_of(run) as controller:
        fleet = controller.engines()
    for line in table(fleet):
        typer.echo(line)
    typer.echo(access_line(run, fleet.engines))


@engines_app.command()
def client(run: Run) -> None:
    """Print a Python program that sends a request to an engine of the run with OpenAI's client."""
    from pipelinerl.commands.remote import client_snippet, controller_of

    with controller_of(run) as controller:
        fleet = controller.engines()
    typer.echo(client_snippet(run, fleet.engines))


@engines_app.command()
def add(
    run: Run,
    url: Annotated[str | None, typer.Argument(help="A running engine, such as http://127.0.0.1:8001.")] = None,
    type: Type = None,
    count: Annotated[int, typer.Option(help="Number of engines to start.")] = 1,
    wait: Wait = True,
) -> None:
    """Add a running engine, or start new ones; they serve once their weights are verified."""
    from pipelinerl.commands.remote import controller_of

    if (url is None) == (type is None):
        raise UserError("give either a running engine's URL or a --type to start")
    if type is not None:
        type = _known(type)
    with controller_of(run) as controller:
        if url is not None:
            controller.register_engine(url)
            engines: tuple[str, ...] = (url.rstrip("/"),)
        else:
            engines = controller.request_engines(str(type), count=count)
        start = ManualStart(run, controller.url, type) if type is not None else None
        if not wait:
            typer.echo("requested " + ", ".join(engines))
            if start is not None and not controller.engines().has_launcher:
                _explain(start, engines, waits=False)
            return
        for which in engines:
            typer.echo(line(joined(controller, which, logs=_logs(run), start=start)))


@engines_app.command()
def drain(run: Run, engine: Which, timeout: Timeout = 60.0, wait: Wait = True) -> None:
    """Send an engine no more work, and remove it once its running requests have finished or the timeout has passed."""
    from pipelinerl.commands.remote import controller_of

    with controller_of(run) as controller:
        controller.drain_engine(engine, grace_s=timeout)
        if wait:
            typer.echo(line(gone(controller, engine, within_s=timeout + 30.0)))
            _explain_end(controller, engine)


@engines_app.command()
def remove(run: Run, engine: Which) -> None:
    """Remove an engine immediately; other engines resample its running requests."""
    from pipelinerl.commands.remote import controller_of

    with controller_of(run) as controller:
        controller.remove_engine(engine)
        typer.echo(f"{engine} was removed")
        _explain_end(controller, engine)


@engines_app.command()
def swap(run: Run, engine: Which, type: Type = None, timeout: Timeout = 60.0, wait: Wait = True) -> None:
    """Replace an engine: start another, and drain the old one once the new one's weights are verified."""
    from pipelinerl.commands.remote import controller_of

    if type is None:
        raise UserError("--type is required: the type of the replacement")
    type = _known(type)
    with controller_of(run) as controller:
        (name,) = controller.request_engines(type, replaces=engine, grace_s=timeout)
        start = ManualStart(run, controller.url, type)
        if not wait:
            typer.echo(f"requested {name}")
            if not controller.engines().has_launcher:
                _explain(start, [name], waits=False)
            return
        typer.echo(line(joined(controller, name, logs=_logs(run), start=start)))
        typer.echo(line(gone(controller, engine, within_s=timeout + 30.0)))
        _explain_end(controller, engine)


@engines_app.command()
def elastic(
    run: Annotated[Path, typer.Argument(help="Directory of the run, live or finished.")],
    overrides: Overrides = None,
) -> None:
    """Show when a run's `elastic` section would have added or removed engines; a dry run."""
    from pipelinerl.plugins.steering.elastic import elastic_decisions

    for line_ in elastic_decisions(run, overrides or ()):
        typer.echo(line_)


def _known(type: str) -> str:
    registry.known("--type", registry.ENGINES, type := anchored(type, working_directory()))
    return type


def _logs(run: str) -> Path | None:
    from pipelinerl.commands.remote import is_url

    return None if is_url(run) else Path(run) / "logs"


@dataclass(frozen=True, slots=True)
class ManualStart:
    """Instructions to start an engine of `type` manually for the live run that the user names as `run`."""

    run: str
    controller_url: str
    type: str

    def command(self, name: str) -> str:
        """Return the command line that starts the engine; capitals stand for values that the user must fill in."""
        from pipelinerl.commands.remote import is_url

        words = ["pipelinerl", "engine", "--name", name, "--type", self.type, "--port", "0"]
        words += ["--controller-url", self.controller_url]
        if is_url(self.run):
            return f"PIPELINERL_TOKEN=TOKEN {shlex.join(words)} --host ADDRESS --recipe RECIPE"
        run_dir = Path(self.run).absolute()
        return shlex.join([*words, "--recipe", str(run_dir / "recipe.toml"), "--run-dir", str(run_dir)])


def _explain(start: ManualStart, names: Sequence[str], *, waits: bool) -> None:
    listed = ", ".join(names)
    typer.echo(f"no launcher is running (services were started manually): start {listed} yourself in another terminal:")
    for name in names:
        typer.echo(f"  {start.command(name)}")
    waiting = f"waiting for {listed}, up to {_JOIN_S:g} s; " if waits else ""
    typer.echo(f"{waiting}to withdraw the request: pipelinerl engines remove {start.run} {names[0]}")


def _explain_end(controller: ControllerClient, engine: str) -> None:
    from pipelinerl.controller.state.fleet import base_url

    fleet = controller.engines()
    urls = [each.url for each in fleet.engines if base_url(engine) in (each.url, each.name)]
    if urls and not fleet.has_launcher:
        typer.echo(f"no launcher is running: the process at {urls[0]} keeps running until you stop it (Ctrl-C)")


def table(fleet: FleetStatus) -> list[str]:
    """Return the table's heading, a line per engine, and a line per requested engine that has not joined yet."""
    names = {engine.name for engine in fleet.engines}
    heading = _ROW.format("name", "type", "lifecycle", "version", "running", "waiting", "tokens/s", "url")
    waiting = [
        _ROW.format(each.name, each.type, "requested", "-", "-", "-", "-", "").rstrip()
        for each in fleet.requested
        if each.name not in names
    ]
    return [heading, *map(line, fleet.engines), *waiting]


def line(engine: EngineStatus) -> str:
    """Return one engine as a row of the table."""
    name, type, rate = engine.name or "-", engine.type or "-", f"{engine.tokens_per_s:.0f}"
    version = "-" if engine.version is None else engine.version
    row = _ROW.format(name, type, engine.state, version, engine.running, engine.waiting, rate, engine.url)
    return f"{row}  {engine.note}".rstrip()


def joined(
    controller: ControllerClient,
    which: str,
    *,
    logs: Path | None,
    within_s: float = _JOIN_S,
    start: ManualStart | None = None,
) -> EngineStatus:
    """Wait until the engine serves; return its status. If the run has no launcher, print the command that starts it.

    Raises:
        UserError: the engine was expelled, or cannot start.
        DeadlineError: the engine has not joined in time.
    """

    engine = _until(
        controller, which, lambda each: each.serves or each.state in _OUT, within_s, "serve", logs, start=start
    )
    if engine.state in _OUT:
        raise UserError(f"{which} was expelled: {engine.last_error}")
    return engine


def gone(controller: ControllerClient, which: str, *, within_s: float) -> EngineStatus:
    """Wait until the engine has left; return its last status, or raise `DeadlineError` after `within_s` seconds."""
    return _until(controller, which, lambda engine: engine.state in _OUT, within_s, "leave", None)


def _until(
    controller: ControllerClient,
    which: str,
    reached: Callable[[EngineStatus], bool],
    within_s: float,
    what: str,
    logs: Path | None,
    *,
    start: ManualStart | None = None,
) -> EngineStatus:
    from pipelinerl.controller.state.fleet import base_url

    log = None if logs is None else logs / f"{which}.log"
    hint = ""
    deadline = time.monotonic() + within_s
    lifecycle = ""
    while time.monotonic() < deadline:
        if log is not None and log.is_file():
            hint = f"; see {log}"
        fleet = controller.engines()
        for engine in fleet.engines:
            if base_url(which) in (engine.url, engine.name):
                lifecycle = f"{engine.state} {engine.last_error}".strip()
                if reached(engine):
                    return engine
        if not lifecycle and which in fleet.to_stop:
            raise UserError(f"{which} did not join, and the run continues without it{_last_word(log)}{hint}")
        if not lifecycle and start is not None and not fleet.has_launcher:
            _explain(start, [which], waits=True)
            start, hint = None, "; the terminal in which you started it shows why"
        time.sleep(_POLL_S)
    state = f"it is {lifecycle}" if lifecycle else "it has not joined the run"
    raise DeadlineError(f"{which} did not {what} within {within_s:g} s; {state}{hint}")


def _last_word(log: Path | None) -> str:
    """Return `: ` and the error message in the last line of the engine's log; empty if that line is no such message."""
    lines = log.read_text(errors="replace").splitlines() if log is not None and log.is_file() else []
    sentence = lines[-1].removeprefix("pipelinerl: ") if lines else ""
    return f": {sentence}" if lines and sentence != lines[-1] else ""
