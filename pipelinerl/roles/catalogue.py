"""The core's roles: descriptions of kinds of process, for the commands `pipelinerl ROLE` and for the launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from pipelinerl import registry
from pipelinerl.config import recipe as recipes
from pipelinerl.observability.logs import without_secrets
from pipelinerl.roles.role import RESTARTED_VARIABLE, OnExit, Role, RoleOptions

if TYPE_CHECKING:  # not imported at run time, so that `pipelinerl --help` starts quickly
    from pipelinerl.roles.process import Identity


@partial(Role, name="trainer-rank", takes=frozenset({"recipe", "changes"}), on_exit=OnExit.DONE, stop_order=2)
def trainer_rank(
    options: RoleOptions,
    rank: Annotated[int, typer.Option(help="1 and above, below trainer.options.distributed.processes.")],
) -> None:
    """Run a rank above 0 of a trainer with several processes (trainer.options.distributed); rank 0 is `trainer`."""
    from pipelinerl.roles import trainer_rank_role

    trainer_rank_role.run(recipes.load(options.recipe, options.changes or []), rank=rank)


@partial(Role, name="redis", port=6379, after=(), stop_order=5)
def redis(options: RoleOptions) -> None:
    """Run the embedded stream server; its password is in <run>/redis/password."""
    from pipelinerl.roles.process import identity_of
    from pipelinerl.streams.embedded_redis import PID_FILE, claim, command
    from pipelinerl.system.http_service import listen
    from pipelinerl.system.machine import LOOPBACK
    from pipelinerl.system.process_record import write_record

    identity = identity_of(options)
    for host in (identity.host, LOOPBACK):
        listen(host, identity.port).close()  # fail here if the port is taken; the server would only log it
    claim(identity.run_dir / "redis")
    argv = command(identity.run_dir / "redis", identity.port, host=identity.host)
    write_record(
        identity.run_dir,
        "redis",
        identity.name,
        argv=[without_secrets(word) for word in sys.orig_argv],  # afterwards this process shows the server's arguments
        ended_without=identity.run_dir / "redis" / PID_FILE,
    )
    print(
        f"pipelinerl: the streams of {identity.run_dir} are at redis://{identity.host}:{identity.port}/0; its "
        f"password is in {identity.run_dir / 'redis' / 'password'}",
        file=sys.stderr,
        flush=True,
    )
    os.execv(argv[0], argv)


@partial(Role, name="controller", port=8000, after=("redis",), on_exit=OnExit.COMPLETE, stop_order=4)
def controller(
    options: RoleOptions,
    go_on: Annotated[
        bool,
        typer.Option("--continue", envvar=RESTARTED_VARIABLE, help="Continue where a controller of this run died."),
    ] = False,
) -> None:
    """Issue prompts, and manage the model version, knobs and engines, until the run is over."""
    from pipelinerl.roles import controller_role

    run_role("controller", options, partial(controller_role.run, from_journal=go_on))


@partial(Role, name="engine-0", port=8001, stop_order=2)
def engine(
    options: RoleOptions,
    type: Annotated[str | None, typer.Option(help="Engine type (default: the recipe's).")] = None,
    model: Annotated[str | None, typer.Option(help="Model directory (default: the recipe's).")] = None,
) -> None:
    """Serve inference in the run of the controller, or alone with --controller-url ''."""
    from pipelinerl.roles import engine_role

    chosen = {"engine.type": type, "model.path": model}
    run_role("engine", options, engine_role.run, changes=[f"{key}={value}" for key, value in chosen.items() if value])


@partial(Role, name="actor-0", stop_order=0)
def actor(options: RoleOptions) -> None:
    """Sample answers from the engines, verify them, and stream the groups."""
    from pipelinerl.roles import actor_role

    run_role("actor", options, actor_role.run)


@partial(Role, name="trainer", on_exit=OnExit.DONE, stop_order=1)
def trainer(options: RoleOptions) -> None:
    """Train on the streamed groups and publish weights, beginning with the run's newest checkpoint."""
    from pipelinerl.roles import trainer_role

    run_role("trainer", options, trainer_role.run)


def run_role(
    role: str,
    options: RoleOptions,
    main: Callable[[Identity], Coroutine[Any, Any, None]],
    *,
    changes: Sequence[str] = (),
) -> None:
    """Run a role's process with the recipe's secrets out of reach of its children; exit with its status."""
    from pipelinerl.roles.process import identity_of, run_until_signalled
    from pipelinerl.system.process_record import recorded
    from pipelinerl.system.secret_variables import withhold

    identity = identity_of(options, changes)
    withhold(identity.config.key_variables)
    if not identity.controller_url:  # an engine of no run
        run_until_signalled(main, identity)
        return
    with recorded(identity.run_dir, role, identity.name):
        run_until_signalled(main, identity)


#: The core's roles, in the order in which `pipelinerl --help` lists them.
ROLES: Final[tuple[Role, ...]] = (
    trainer_rank, redis, controller, engine, actor, trainer,
)  # fmt: skip


def role_of(subcommand: str) -> Role:
    """Return the role with this subcommand, of the core or a plug-in; raise `RecipeError` if the plug-in is missing."""
    for role in ROLES:
        if role.subcommand == subcommand:
            return role
    of_plugin: Role = registry.ROLES[subcommand]
    return of_plugin
