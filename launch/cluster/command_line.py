"""The commands for runs on several hosts: `plan` and `node`; and the options that `run` shares with them.

    add_cluster_commands(app, connect=…, claim=…, refuse=…)

They read arguments and call what does the work. The controller's client is handed in, and what looks at a recipe: the
launcher knows both by what it calls alone.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pipelinerl.config.recipe import RunConfig, load
from pipelinerl.errors import UserError

if TYPE_CHECKING:  # `pipelinerl --help` need not wait for them
    from launch.cluster.launchers import ClusterTarget
    from launch.cluster.membership import Members
    from launch.plan import Launch
    from launch.run import Connect

_Claim = Callable[[RunConfig], bool]
_Refuse = Callable[[RunConfig], None]

_PANEL: Final = "More than one machine"

HostWords = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        help="A host: NAME, NAME=ADDRESS or NAME=ADDRESS:gpus=8,roles=engine+actor; again for each. The first is the "
        "head.",
    ),
]
HostCount = Annotated[int | None, typer.Option("--hosts", help="How many hosts, where something else names them.")]
Gpus = Annotated[int | None, typer.Option("--gpus", min=0, help="GPUs of each host that does not say so itself.")]
FirstPort = Annotated[
    int | None,
    typer.Option("--first-port", min=1024, max=65000, help="Ports of the run on several hosts, from here on."),
]

On = Annotated[
    str | None,
    typer.Option(
        "--on",
        help="What starts the nodes on the hosts: slurm, kubernetes, ray or ray://HOST:10001. By default you do.",
    ),
]
SlurmOptions = Annotated[
    list[str] | None,
    typer.Option("--slurm", help="An option of sbatch, such as --slurm=--partition=gpu; again for each."),
]
Image = Annotated[str | None, typer.Option("--image", help="Container image with this project, for --on kubernetes.")]


def elsewhere_of(on: str, members: Members | None, slurm_options: list[str] | None, image: str | None) -> ClusterTarget:
    """Where `--on` says that a run is to be.

    Raises:
        UserError: it names nothing that is known, or how many hosts is not said.
    """
    from launch.cluster.launchers import ClusterTarget, read_launcher

    by, address = read_launcher(on)
    if members is None:
        raise UserError(f"--on {on} must know how many hosts the run is to have: say --hosts 2, or --host for each")
    return ClusterTarget(by=by, members=members, slurm_options=tuple(slurm_options or ()), image=image, address=address)


def refuse_hosts(resume: str, on: str | None, words: list[str] | None, count: int | None) -> None:
    """Return when a run that goes on is given no hosts: it has its own. Raises UserError."""
    if on is not None or words or count is not None:
        raise UserError(
            f"--resume goes on where {resume} was begun: leave out --on, --host and --hosts. Begin its nodes on other "
            "hosts with `pipelinerl node --host …`, a Slurm job with its slurm.sh (docs/use/clusters.md)"
        )


def members_of(
    config: RunConfig, words: list[str] | None, count: int | None, gpus: int | None, first_port: int | None
) -> Members | None:
    """The hosts that a command line names; None where it names none: this machine.

    Raises:
        UserError: they cannot be read.
    """
    from launch.cluster.membership import FIRST_PORT, Members
    from launch.hosts import read_hosts

    if not words and count is None:
        return None
    return Members(hosts=read_hosts(config, words or [], count=count, gpus=gpus), first_port=first_port or FIRST_PORT)


def add_cluster_commands(app: typer.Typer, *, connect: Connect, claim: _Claim, refuse: _Refuse) -> None:
    """Add the commands to the command line; `connect` makes the client of a run's controller.

    `claim` is `run_directory.create`'s; `refuse` raises UserError for a recipe that cannot run.
    """
    _add_plan(app)
    _add_node(app, connect, claim, refuse)


def _add_plan(app: typer.Typer) -> None:
    @app.command(rich_help_panel=_PANEL)
    def plan(
        recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped recipe.")],
        overrides: Annotated[list[str] | None, typer.Argument(help="Changes: section.key=value …")] = None,
        host: HostWords = None,
        hosts: HostCount = None,
        gpus: Gpus = None,
        first_port: FirstPort = None,
        on: On = None,
        slurm: SlurmOptions = None,
        image: Image = None,
        as_json: Annotated[bool, typer.Option("--json", help="The whole plan, for programs.")] = False,
    ) -> None:
        """Who would run where: hosts, ports, devices, ranks, environment and restart rules. Starts nothing.

        With --on, what that would be given to start it all.
        """
        from launch.cluster.table import plan_json, plan_lines

        config = load(recipe, overrides or [])
        members = members_of(config, host, hosts, gpus, first_port)
        launch = _planned(config, members)
        if on is not None:
            from launch.cluster.launchers import rendered

            typer.echo(rendered(config, elsewhere_of(on, members, slurm, image), launch.run_dir))
            return
        if as_json:
            typer.echo(json.dumps(plan_json(launch), indent=2))
        else:
            typer.echo("\n".join(plan_lines(launch)))
            if members is None:
                typer.echo("ports: examples; a run on one machine takes some that are free when it begins")


def _add_node(app: typer.Typer, connect: Connect, claim: _Claim, refuse: _Refuse) -> None:
    @app.command(rich_help_panel=_PANEL)
    def node(
        run: Annotated[Path, typer.Argument(help="Directory of the run, which all its hosts see.")],
        name: Annotated[
            str | None,
            typer.Option("--name", help="Which host of the run this machine is (default: as it calls itself)."),
        ] = None,
        host: HostWords = None,
        gpus: Gpus = None,
        first_port: FirstPort = None,
        recipe: Annotated[
            Path | None, typer.Option("--recipe", help="Recipe by which the head begins the run, if there is none yet.")
        ] = None,
    ) -> None:
        """Run one host's share of a run, until the run is over. Every host runs one; the first is the head."""
        from launch.cluster.node import run_node

        raise typer.Exit(
            run_node(
                run,
                name or socket.gethostname().partition(".")[0],
                lambda config: members_of(config, host, None, gpus, first_port),
                recipe=recipe,
                claim=claim,
                refuse=refuse,
                connect=connect,
            )
        )


def _planned(config: RunConfig, members: Members | None) -> Launch:
    from dataclasses import replace

    from launch.cluster.membership import FIRST_PORT
    from launch.devices import devices_for
    from launch.hosts import LOCALHOST
    from launch.plan import Launch, Ports
    from launch.spread import spread

    here = (replace(LOCALHOST, devices=devices_for(config, os.environ)),) if members is None else members.hosts
    homes, placement = spread(config, here)
    first = FIRST_PORT if members is None else members.first_port
    run_dir = config.run_directory.resolve()
    return Launch(
        config=config,
        run_dir=run_dir,
        ports=Ports.of(config, range(first, first + Ports.count(config))),
        token_file=run_dir / "tokens.json",
        cores=sorted(os.sched_getaffinity(0)) if members is None else (),
        placement=placement,
        homes=homes,
    )
