"""The `pipelinerl` command line. Each command parses its arguments and calls the module that does the work.

User errors are printed as one sentence on stderr with exit status 2. Commands import heavy libraries lazily.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from launch.cluster.command_line import (
    FirstPort,
    Gpus,
    HostCount,
    HostWords,
    Image,
    On,
    SlurmOptions,
    add_cluster_commands,
    elsewhere_of,
    members_of,
    refuse_hosts,
)
from pipelinerl import registry
from pipelinerl.component import Need, imported
from pipelinerl.config import recipe as recipes
from pipelinerl.errors import PipelineError, RecipeError, UserError
from pipelinerl.observability.logs import without_secrets
from pipelinerl.observability.samples import visible
from pipelinerl.roles.catalogue import ROLES
from pipelinerl.roles.role import Changes, Overrides, Recipe, Run, RunPath, hide_password, joined
from pipelinerl.system.files import system_words, working_directory
from pipelinerl.system.process import collect_rarely, run_process

_ROLES: Final = "Roles (each is one process; `run` starts them all)"


class _Commands(TyperGroup):
    """The commands and roles of the core, which are registered below, and those of plug-ins, imported when called."""

    #: True in a context that only lists commands.
    LISTS = "pipelinerl.lists"

    def format_help(self, ctx: Any, formatter: Any) -> None:
        ctx.meta[self.LISTS] = True
        super().format_help(ctx, formatter)

    def list_commands(self, ctx: Any) -> list[str]:
        plugins = (name for kind in (registry.COMMANDS, registry.ROLES) for name, _ in kind.loadable())
        return [*super().list_commands(ctx), *plugins]

    def get_command(self, ctx: Any, name: str) -> Any:
        if name in registry.COMMANDS:
            component = registry.COMMANDS[name]
            if ctx.meta.get(self.LISTS):
                return TyperCommand(name, help=component.help, hidden=component.hidden)
            return _added(name, imported(component.build), help=component.help, hidden=component.hidden)
        if name in registry.ROLES:
            return _added(name, registry.ROLES[name].command, rich_help_panel=_ROLES)
        return super().get_command(ctx, name)


def _added(name: str, command: Any, **settings: Any) -> Any:
    alone = typer.Typer(callback=lambda: None)  # with a callback, it stays a group of this one command
    alone.add_typer(command, name=name, **settings) if isinstance(command, typer.Typer) else alone.command(
        name, **settings
    )(command)
    return typer.main.get_group(alone).commands[name]


app = typer.Typer(
    cls=_Commands,
    name="pipelinerl",
    help="Asynchronous streaming RL post-training with in-flight weight updates.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pipelinerl {version('pipelinerl')}")
        raise typer.Exit


@app.callback(context_settings={"help_option_names": ["-h", "--help"]})
def _common(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
@app.command("train", hidden=True)
def run(
    recipe: Annotated[str | None, typer.Argument(help="Recipe file, or name of a shipped one (default: tiny).")] = None,
    overrides: Overrides = None,
    changes: Changes = None,
    resume: Annotated[
        str | None,
        typer.Option(help="Resume the run in this directory or at this URL; changes may follow: run.steps=200."),
    ] = None,
    new: Annotated[
        bool, typer.Option("--new", help="Start another run although one of this name is live; adds a number.")
    ] = False,
    host: HostWords = None,
    hosts: HostCount = None,
    gpus: Gpus = None,
    first_port: FirstPort = None,
    on: On = None,
    slurm: SlurmOptions = None,
    image: Image = None,
) -> None:
    """Train: start every role on this machine, show progress, write the report. Ctrl-C saves and stops the run.

    `pipelinerl train` is the same.

    With --node, this machine is the first of several that each run `pipelinerl node`. With --on, a cluster launcher
    starts them (docs/use/clusters.md).
    """
    from launch import run as launching
    from launch.run_directory import change_recipe, open_run, record_change, refuse_namesake
    from pipelinerl.commands.remote import started_by_hand
    from pipelinerl.roles import resumed_run
    from pipelinerl.roles.dtypes import outlined, settled, with_directories, with_plain_models

    made = joined(overrides, changes)
    if recipe is not None and "=" in recipe and not Path(recipe).is_file():  # a change of the default recipe
        made = [recipe, *made]
        recipe = None
    if resume is not None:
        if recipe is not None:
            raise UserError(f"--resume uses the recipe in {resume}; give only changes, such as run.steps=200")
        refuse_hosts(resume, on, host, hosts)
        path = resumed_run.directory_of(resume)
        open_run(path)
        config = change_recipe(path, made)
        with outlined(config) as (plain, copies, _):
            _refuse_here(plain)
            _refuse_full_disk([*copies, *_needs(plain, {}, path)])
        with_plain_models(config)
        for change in record_change(path, config, step=resumed_run.newest_step(config, path)):
            typer.echo(change)
        raise typer.Exit(launching.resume(path, connect=_connect))
    config = recipes.load(recipe or "tiny", made)
    if not new and on is None:
        refuse_namesake(config, by_hand=started_by_hand)
    members = members_of(config, host, hosts, gpus, first_port)
    with outlined(config) as (plain, copies, sources):
        (_refuse_here if on is None else _refuse)(plain)
        if on is not None:
            from launch.cluster.launchers import start_on

            raise typer.Exit(start_on(config, elsewhere_of(on, members, slurm, image), claim=resumed_run.claim))
        limits = launching.memory_limits(config) if members is None else {}
        if members is None:
            plain = settled(plain, limits)
        needs = _needs(plain, limits)
        _refuse_full_disk([*copies, *needs])
    config = with_directories(plain, sources)
    with_plain_models(config)
    directory = launching.prepare(config, claim=resumed_run.claim, members=members)
    for need in needs:
        if need.part != "disk":
            typer.echo(need.text)
    raise typer.Exit(launching.resume(directory, connect=_connect))


@app.command()
def check(
    recipe: Recipe,
    overrides: Overrides = None,
    changes: Changes = None,
    device_gib: Annotated[
        float | None, typer.Option(min=0, max=2**20, help="Device memory in GiB (default: this machine's).")
    ] = None,
) -> None:
    """Check a recipe without training: reject every mistake that would stop the run.

    Exit status 1: the recipe is valid, but needs more memory or disk than this machine has, or a GPU that it lacks.
    With --device-gib, the recipe is for another machine, and a missing GPU is only a warning.
    """
    from launch.run import describe_placement, memory_limits
    from pipelinerl.commands.check import findings, keys_without_gpu
    from pipelinerl.roles.dtypes import outlined, settled

    config = recipes.load(recipe, joined(overrides, changes))
    limit = None if device_gib is None else int(device_gib * 2**30)
    limits = memory_limits(config) if limit is None else {"trainer": limit, "engine": limit}
    with outlined(config) as (plain, copies, sources):
        plain = settled(plain, limits)
        for name, finding in findings(plain, sources):
            typer.echo(f"{name:<12} {finding}")
        needs = [*copies, *_needs(plain, limits)]
    typer.echo(f"{'placement':<12} {describe_placement(config)}")
    for need in needs:
        typer.echo(f"{need.part:<12} {need.text}")
    lacking = [need.part for need in needs if need.lacking]
    if limit is None and keys_without_gpu(config):
        lacking.append("GPUs")
    if lacking:
        typer.echo(f"the recipe needs more {' and '.join(dict.fromkeys(lacking))} than this machine has")
        raise typer.Exit(1)
    typer.echo("the recipe can run")


def _needs(config: recipes.RunConfig, limits: Mapping[str, int], directory: Path | None = None) -> list[Need]:
    needs = list[Need]()
    for name in registry.NEEDS:
        try:
            prediction = registry.NEEDS[name]
        except RecipeError as error:
            needs.append(Need(name, f"not predicted: {error}"))
        else:
            needs += imported(prediction.build)(config, limits, directory)
    return needs


def _refuse_full_disk(needs: Sequence[Need]) -> None:
    for need in needs:
        if need.part == "disk" and need.lacking:
            raise UserError(need.text)


@app.command()
def status(
    run: Run,
    json: Annotated[bool, typer.Option("--json", help="Print the whole state as JSON.")] = False,
) -> None:
    """Show what a live run is doing and what it waits for."""
    from pipelinerl.commands.remote import access_line, controller_of
    from pipelinerl.observability import progress

    with controller_of(run) as controller:
        state = controller.status()
    if json:
        typer.echo(state.to_json())
        return
    for line in (
        progress.line(state),
        *progress.server_lines(state),
        *progress.domain_lines(state),
        *progress.incident_lines(state),
        access_line(run, state.fleet.engines),
    ):
        typer.echo(visible(line))


@app.command()
def stop(
    run: Run,
    suspend: Annotated[
        bool, typer.Option("--suspend", help="Save and stop now, without a final evaluation; continue with --resume.")
    ] = False,
) -> None:
    """Stop a live run at its next step boundary, after a final checkpoint and evaluation."""
    from pipelinerl.commands.remote import controller_of

    with controller_of(run) as controller:
        if suspend:
            controller.suspend()
        else:
            controller.stop()
    typer.echo("the run will stop at its next step boundary")


def _connect(url: str, token: str) -> Any:
    from pipelinerl.controller.client import ControllerClient
    from pipelinerl.controller.routes import LAUNCHER

    return ControllerClient(url, token, who=LAUNCHER)


def _claim(config: recipes.RunConfig) -> bool:
    from pipelinerl.roles import resumed_run

    return resumed_run.claim(config)


def _refuse(config: recipes.RunConfig) -> None:
    """Reject a recipe with which the run would fail, before anything is created. Fast, and needs little memory."""
    from pipelinerl.commands.check import refuse
    from pipelinerl.commands.findings.problems import FIRST, refuse_problems

    refuse(config)
    refuse_problems(config, FIRST)


def _refuse_here(config: recipes.RunConfig) -> None:
    """Reject a recipe of a run on this machine, after a trial episode of each agent."""
    from pipelinerl.commands.check import refuse_episodes

    _refuse(config)
    refuse_episodes(config)


@app.command(rich_help_panel="Roles (each is one process; `run` starts them all)")
def adopt(run_dir: RunPath) -> None:
    """Watch the roles of a run that were started one by one on this machine, and restart those that die."""
    from launch.adoption import adopt as watch_over

    raise typer.Exit(watch_over(run_dir))


add_cluster_commands(app, connect=_connect, claim=_claim, refuse=_refuse)
for _role in ROLES:
    app.command(_role.subcommand, rich_help_panel=_ROLES)(_role.command)


def main() -> None:
    """Run the command line; user errors become one sentence and exit status 2."""
    collect_rarely()
    hide_password()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # some terminals cannot encode the Unicode characters in the output
            stream.reconfigure(errors="backslashreplace")
    try:
        working_directory()
        app(prog_name="pipelinerl")
    except UserError as error:
        print(visible(without_secrets(f"pipelinerl: {error}")), file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:  # such as an unreadable file or a full disk; the system's message names the file
        print(visible(without_secrets(f"pipelinerl: {system_words(error)}")), file=sys.stderr)
        raise SystemExit(1) from None
    except PipelineError as error:
        print(visible(without_secrets(f"pipelinerl: {error}")), file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    run_process(main)
