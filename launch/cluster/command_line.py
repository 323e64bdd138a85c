"""The commands for runs on several hosts, `plan` and `node`, and the options that `run` shares with them.

    add_cluster_commands(app, connect=…, claim=…, refuse=…)

The caller passes these three functions, since the launcher does not import the code that they need.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pipelinerl.config.recipe import RunConfig, load
from pipelinerl.errors import UserError
from pipelinerl.roles.role import Changes, joined

if TYPE_CHECKING:  # not imported at run time, so that `pipelinerl --help` starts quickly
    from launch.cluster.launchers import ClusterTarget
    from launch.cluster.membership import Members
    from launch.run import Connect

_Claim = Callable[[RunConfig], bool]
_Refuse = Callable[[RunConfig], None]

_PANEL: Final = "More than one machine"

HostWords = Annotated[
    list[str] | None,
    typer.Option(
        "--node",
        help="A host: NAME, NAME=ADDRESS or NAME=ADDRESS:gpus=8,roles=engine+actor; repeatable. The first is the head.",
    ),
]
HostCount = Annotated[int | None, typer.Option("--nodes", help="Number of hosts, if the launcher names them.")]
Gpus = Annotated[int | None, typer.Option("--gpus", min=0, help="GPUs of each host whose --node does not give them.")]
FirstPort = Annotated[
    int | None, typer.Option("--first-port", min=1024, max=65000, help="First port of a run on several hosts.")
]

On = Annotated[
    str | None,
    typer.Option("--on", help="What starts the nodes: slurm, kubernetes, ray or ray://HOST:10001 (default: you do)."),
]
SlurmOptions = Annotated[
    list[str] | None, typer.Option("--slurm", help="An option of sbatch, such as --slurm=--partition=gpu; repeatable.")
]
Image = Annotated[str | None, typer.Option("--image", help="Container image with this project, for --on kubernetes.")]


def elsewhere_of(on: str, members: Members | None, slurm_options: list[str] | None, image: str | None) -> ClusterTarget:
    """Return the target that `--on` specifies; raise `UserError` if it names no launcher, or no hosts are given."""
    from launch.cluster.launchers import ClusterTarget, Launcher

    by, address = ("ray", on) if on.startswith("ray://") else (on, None)
    if by not in list(Launcher):
        raise UserError(f"--on must be one of {', '.join(Launcher)}, or ray://HOST:10001; got {on!r}")
    if members is None:
        raise UserError(f"--on {on} needs the number of hosts; pass --nodes 2, or --node for each")
    return ClusterTarget(Launcher(by), members, tuple(slurm_options or ()), image, address)


def refuse_hosts(resume: str, on: str | None, words: list[str] | None, count: int | None) -> None:
    """Raise `UserError` if the command line of a resumed run names hosts: the run continues on its earlier hosts."""
    if on is not None or words or count is not None:
        raise UserError(
            f"--resume continues {resume} on its own hosts; remove --on, --node and --nodes. To use other hosts, start "
            "its nodes with `pipelinerl node --node …`, or submit its slurm.sh (docs/use/clusters.md)"
        )


def members_of(
    config: RunConfig, words: list[str] | None, count: int | None, gpus: int | None, first_port: int | None
) -> Members | None:
    """Return the hosts that the options name; None for a run on this machine alone. Raise `UserError` if invalid."""
    from launch.cluster.membership import FIRST_PORT, Members
    from launch.hosts import read_hosts

    if not words and count is None:
        return None
    return Members(hosts=read_hosts(config, words or [], count=count, gpus=gpus), first_port=first_port or FIRST_PORT)


def add_cluster_commands(app: typer.Typer, *, connect: Connect, claim: _Claim, refuse: _Refuse) -> None:
    """Add the commands `plan` and `node` to the command line.

    `connect` makes the client of a run's controller, `claim` reserves the run's name (see `run_directory.create`), and
    `refuse` raises `UserError` for a recipe that cannot run.
    """
    _add_plan(app)
    _add_node(app, connect, claim, refuse)


def _add_plan(app: typer.Typer) -> None:
    @app.command(rich_help_panel=_PANEL)
    def plan(
        recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped recipe.")],
        overrides: Annotated[list[str] | None, typer.Argument(help="Changes: section.key=value …")] = None,
        changes: Changes = None,
        host: HostWords = None,
        hosts: HostCount = None,
        gpus: Gpus = None,
        first_port: FirstPort = None,
        on: On = None,
        slurm: SlurmOptions = None,
        image: Image = None,
        as_json: Annotated[bool, typer.Option("--json", help="The whole plan, for programs.")] = False,
    ) -> None:
        """Show where each process would run: hosts, ports, devices, ranks, environment and restart rules.

        Starts nothing. With --on, show the script, manifests or resources that would be passed to that launcher.
        """
        from launch.cluster.launchers import plan_json, plan_lines, rendered
        from launch.cluster.membership import FIRST_PORT
        from launch.plan import Launch
        from launch.run import this_machine

        config = load(recipe, joined(overrides, changes))
        members = members_of(config, host, hosts, gpus, first_port)
        if members is not None:
            launch = members.launch(config, config.run_directory.resolve())
        else:
            cores = sorted(os.sched_getaffinity(0))
            run_dir, ports = config.run_directory.resolve(), count(FIRST_PORT)
            launch = Launch.on([this_machine(config)], config, run_dir=run_dir, ports=ports, cores=cores)
        if on is not None:
            typer.echo(rendered(config, elsewhere_of(on, members, slurm, image), launch.run_dir))
            return
        if as_json:
            typer.echo(json.dumps(plan_json(launch), indent=2))
        else:
            typer.echo("\n".join(plan_lines(launch)))
            if members is None:
                typer.echo("ports are examples: a run on one machine takes free ports when it begins")


def _add_node(app: typer.Typer, connect: Connect, claim: _Claim, refuse: _Refuse) -> None:
    @app.command(rich_help_panel=_PANEL)
    def node(
        run: Annotated[Path, typer.Argument(help="Directory of the run, which all its hosts see.")],
        name: Annotated[
            str | None,
            typer.Option("--name", help="Name of this machine among the run's hosts (default: its host name)."),
        ] = None,
        host: HostWords = None,
        gpus: Gpus = None,
        first_port: FirstPort = None,
        recipe: Annotated[
            Path | None,
            typer.Option("--recipe", help="Recipe from which the head begins the run, if there is none yet."),
        ] = None,
    ) -> None:
        """Run one host's share of a run until the run is over. Every host runs one node; the first is the head."""
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
