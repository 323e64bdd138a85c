"""`pipelinerl controller`, `engine`, `actor`, `trainer` …: one command for each process of a run."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from pipelinerl.commands.processes.role_options import ROLES, Changes, RoleOptions, RoleRecipe, role_command
from pipelinerl.config import recipe as recipes

roles_app = typer.Typer()


@roles_app.command(rich_help_panel=ROLES)
def trainer_rank(
    rank: Annotated[int, typer.Option(help="1 and above, below trainer.options.distributed.processes.")],
    recipe: RoleRecipe = "tiny",
    changes: Changes = None,
) -> None:
    """A further process of a trainer of several (trainer.options.distributed); obeys `trainer`, which is rank 0."""
    from pipelinerl.roles import trainer_rank_role

    trainer_rank_role.run(recipes.load(recipe, changes or []), rank=rank)


@role_command(roles_app, name="redis", port=6379)
def redis(options: RoleOptions) -> None:
    """The embedded stream server; its password is in <run>/redis/password."""
    from pipelinerl.roles import redis_role

    redis_role.run(options.identity())


@role_command(roles_app, name="controller", port=8000)
def controller(
    options: RoleOptions,
    go_on: Annotated[
        bool,
        typer.Option(
            "--continue",
            envvar="PIPELINERL_RESTARTED",  # which the launcher sets for what it starts again
            help="Go on where a controller of this live run died.",
        ),
    ] = False,
) -> None:
    """Issues prompts, owns version, knobs and fleet; ends when the run is over."""
    from pipelinerl.controller.service.service import Start
    from pipelinerl.roles import controller_role

    options.run(partial(controller_role.run, start=Start.FROM_JOURNAL if go_on else Start.AFRESH))


@role_command(roles_app, name="engine-0", port=8001)
def engine(
    options: RoleOptions,
    type: Annotated[str | None, typer.Option(help="Engine type (default: the recipe's).")] = None,
    model: Annotated[str | None, typer.Option(help="Model directory (default: the recipe's).")] = None,
) -> None:
    """An inference server; joins the run of the controller, or serves alone with --controller-url ''."""
    from pipelinerl.roles import engine_role

    chosen = {"engine.type": type, "model.path": model}
    options.run(engine_role.run, changes=[f"{key}={value}" for key, value in chosen.items() if value])


@role_command(roles_app, name="parameter-server-0", port=8100)
def parameter_server(options: RoleOptions) -> None:
    """Holds versions of the weights in memory, for engines to pull (weights.transport=pull)."""
    from pipelinerl.roles import parameter_server_role

    options.run(parameter_server_role.run)


@role_command(roles_app, name="verifier-0", port=8200)
def verifier(
    options: RoleOptions,
    domain: Annotated[
        list[str] | None, typer.Option(help="Judge this domain, and others that are named so (default: all).")
    ] = None,
) -> None:
    """Judges answers for the actors of a run (verification.services); joins by the controller, on any machine."""
    from pipelinerl.roles import verifier_role

    options.run(partial(verifier_role.run, only=domain or ()))


@role_command(roles_app, name="actor-0")
def actor(options: RoleOptions) -> None:
    """Samples prompts at the engines, verifies the answers, streams the groups."""
    from pipelinerl.roles import actor_role

    options.run(actor_role.run)


@role_command(roles_app, name="trainer")
def trainer(options: RoleOptions) -> None:
    """Trains on the streamed groups and publishes weights; goes on from the newest checkpoint of the run."""
    from pipelinerl.roles import trainer_role

    options.run(trainer_role.run)


@role_command(roles_app, name="tracker")
def tracker(options: RoleOptions) -> None:
    """Takes the run's figures to the recipe's trackers (TensorBoard, W&B, trackio); the run does not wait for it."""
    from pipelinerl.roles import tracker_role

    options.run(tracker_role.run)
