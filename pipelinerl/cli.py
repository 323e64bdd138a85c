"""`pipelinerl`: the command line. Every command is a thin reading of arguments before the part that does the work.

User errors are one sentence on stderr and exit status 2. Heavy libraries are imported by the commands that need them.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from pipelinerl.commands.chaos_command import chaos
from pipelinerl.commands.engines_command import Run, engines_app
from pipelinerl.commands.explain_command import explain
from pipelinerl.commands.mismatch_command import mismatch
from pipelinerl.commands.replay_command import replay
from pipelinerl.commands.trainer_rank_command import trainer_rank
from pipelinerl.config import recipe as recipes
from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import PipelineError, RecipeError, UserError

app = typer.Typer(
    name="pipelinerl",
    help="Asynchronous streaming RL post-training with in-flight weight updates.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
knobs_app = typer.Typer(help="Show or change the knobs of a live run.", no_args_is_help=True)
conformance_app = typer.Typer(help="Check an engine or a trainer against its contract.", no_args_is_help=True)
app.add_typer(knobs_app, name="knobs")
app.add_typer(engines_app, name="engines")
app.add_typer(conformance_app, name="conformance")

ROLES: Final = "Roles (each is one process; `run` starts them all)"

Recipe = Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped recipe.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Changes to the recipe: section.key=value …")]
RunPath = Annotated[Path, typer.Argument(help="Directory of the run, such as runs/tiny.")]


@app.command()
def run(
    recipe: Annotated[str | None, typer.Argument(help="Recipe file, or name of a shipped one (default: tiny).")] = None,
    overrides: Overrides = None,
    resume: Annotated[str | None, typer.Option(help="Go on with the run in this directory, or at this URL.")] = None,
) -> None:
    """Train: start every role on this machine, show progress, write the report."""
    from launch import run as launching
    from pipelinerl.commands import resumption
    from pipelinerl.commands.check import refuse

    if resume is not None:
        if recipe is not None:
            raise UserError(f"--resume goes on by the recipe in {resume}; change its recipe.toml, or start another run")
        raise typer.Exit(launching.resume(resumption.directory_of(resume)))
    config = recipes.load(recipe or "tiny", overrides or [])
    refuse(config)
    raise typer.Exit(launching.start(config, claim=resumption.claim))


@app.command()
def check(recipe: Recipe, overrides: Overrides = None) -> None:
    """Dry run of a recipe: everything that can be refused without training is refused here."""
    from launch.run import describe_placement
    from pipelinerl.commands.check import findings

    config = recipes.load(recipe, overrides or [])
    for name, finding in findings(config):
        typer.echo(f"{name:<12} {finding}")
    typer.echo(f"{'placement':<12} {describe_placement(config)}")
    typer.echo("the recipe can run")


@app.command()
def status(
    run: Run,
    json: Annotated[bool, typer.Option("--json", help="The whole state, for programs.")] = False,
) -> None:
    """What a live run is doing, and what it waits for."""
    from pipelinerl.commands.remote import Remote
    from pipelinerl.observability import progress

    state = Remote.of(run).status()
    if json:
        typer.echo(state.to_json())
        return
    typer.echo(progress.line(state))


@knobs_app.command("show")
def knobs_show(run: Run) -> None:
    """The knobs of a live run and the log of their changes."""
    from pipelinerl.commands.remote import Remote

    answer = Remote.of(run).knobs()
    for name, value in answer.knobs.items():
        typer.echo(f"{name} = {value}")
    for change in answer.log:
        made = ", ".join(f"{name} = {value}" for name, value in change.changes.items())
        typer.echo(f"step {change.step}: {made} by {change.who}")


@knobs_app.command("set")
def knobs_set(run: Run, changes: Annotated[list[str], typer.Argument(help="knob=value …, e.g. k=4 j=2")]) -> None:
    """Change knobs of a live run; they take effect at the next step boundary."""
    from pipelinerl.commands.remote import Remote

    answer = Remote.of(run).change(dict(_assignment(change) for change in changes))
    for name, value in answer.knobs.items():
        typer.echo(f"{name} = {value}")
    typer.echo(f"effective {answer.effective}")


@app.command()
def stop(run: Run) -> None:
    """End a live run at its next step boundary, with checkpoint and evaluation."""
    from pipelinerl.commands.remote import Remote

    Remote.of(run).stop()
    typer.echo("the run will stop at its next step boundary")


@app.command()
def report(run_dir: RunPath) -> None:
    """Write learning_curve.png and report.html of a run, also while it is live."""
    from launch import run as launching

    for path in launching.report(run_dir):
        typer.echo(str(path))


@app.command()
def warmstart(
    output: Annotated[Path, typer.Argument(help="Directory to make and write the model to.")],
    seed: Annotated[int, typer.Option(help="Seed of weights and demonstrations.")] = 0,
    recipe: Annotated[str, typer.Option(help="Recipe whose domains give the demonstrations.")] = "tiny",
    hidden: Annotated[int, typer.Option(help="Width of the decoder.")] = 96,
    layers: Annotated[int, typer.Option(help="Layers of the decoder.")] = 2,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    at_least: Annotated[float, typer.Option(help="Stop at this greedy accuracy on the validation split.")] = 0.38,
    at_most: Annotated[float, typer.Option(help="Fail above this one: RL would have too little to do.")] = 0.44,
) -> None:
    """Make a small model and fit demonstrations until it has partial skill, as a start for RL."""
    from pipelinerl.commands.warmstart import WarmStartOptions, make

    options = WarmStartOptions(hidden=hidden, layers=layers, heads=heads, accuracy=(at_least, at_most), seed=seed)
    make(recipes.load(recipe), options, output=output, say=typer.echo)


@conformance_app.command("engine")
def conformance_engine(
    url: Annotated[str, typer.Argument(help="Base URL of the engine, such as http://127.0.0.1:8001.")],
    token_file: Annotated[Path | None, typer.Option(help="File with the bearer token.")] = None,
) -> None:
    """Run the inference contract's kit against a live engine. It leaves other weights behind."""
    from pipelinerl.commands.conformance import check_engine
    from pipelinerl.roles.process import read_token

    raise typer.Exit(0 if check_engine(url.rstrip("/"), token=read_token(token_file), say=typer.echo) else 1)


@conformance_app.command("trainer")
def conformance_trainer(
    target: Annotated[str, typer.Argument(help="module:Class, or the name of a registered trainer.")],
    model: Annotated[Path, typer.Option(help="Model directory for it to train.")] = recipes.MODELS / "tiny_speller",
) -> None:
    """Run the trainer contract's kit against a class."""
    from pipelinerl.commands.conformance import check_trainer

    raise typer.Exit(0 if check_trainer(target, model, say=typer.echo) else 1)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="A benchmark's name, or `all`.")] = "all",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds and sizes.")] = False,
) -> None:
    """Run benchmarks and write their records (from a checkout)."""
    from pipelinerl.commands.from_checkout import run_in_checkout

    raise typer.Exit(run_in_checkout("benchmarks", name, *(["--quick"] if quick else []), what="benchmarks are"))


# --- roles -----------------------------------------------------------------------------------------------------------

RoleRecipe = Annotated[str, typer.Option("--recipe", help="Recipe of the run; the same for every role.")]
Name = Annotated[str, typer.Option("--name", help="This process' name; unique within the run.")]
RunDir = Annotated[Path | None, typer.Option("--run-dir", help="The run's directory (default: by the recipe).")]
RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        envvar="PIPELINERL_REDIS_URL",  # where a password is in nobody's process list
        help="Where the streams are (default: by the recipe, else redis://127.0.0.1:6379/0).",
    ),
]
ControllerUrl = Annotated[str, typer.Option("--controller-url", help="Where the controller is.")]
TokenFile = Annotated[Path | None, typer.Option("--token-file", help="Bearer token (default: $PIPELINERL_TOKEN).")]
Host = Annotated[str, typer.Option("--host", help="Address to bind.")]
Port = Annotated[int, typer.Option("--port", help="Port to bind.")]
Changes = Annotated[list[str] | None, typer.Option("--set", help="Change of the recipe: section.key=value.")]

LOCAL_REDIS: Final = "redis://127.0.0.1:6379/0"
LOCAL_CONTROLLER: Final = "http://127.0.0.1:8000"


app.command()(mismatch)
app.command()(explain)
app.command()(replay)
app.command()(chaos)
app.command(rich_help_panel=ROLES)(trainer_rank)


@app.command(rich_help_panel=ROLES)
def redis(
    recipe: RoleRecipe = "tiny",
    name: Name = "redis",
    run_dir: RunDir = None,
    redis_url: RedisUrl = None,
    controller_url: ControllerUrl = LOCAL_CONTROLLER,
    token_file: TokenFile = None,
    host: Host = "127.0.0.1",
    port: Port = 6379,
    changes: Changes = None,
) -> None:
    """The embedded stream server; its password is in <run>/redis/password."""
    from pipelinerl.roles import redis_role

    redis_role.run(
        _identity(recipe, name, run_dir, redis_url, controller_url, token_file, changes, host=host, port=port)
    )


@app.command(rich_help_panel=ROLES)
def controller(
    recipe: RoleRecipe = "tiny",
    name: Name = "controller",
    run_dir: RunDir = None,
    redis_url: RedisUrl = None,
    controller_url: ControllerUrl = LOCAL_CONTROLLER,
    token_file: TokenFile = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    go_on: Annotated[
        bool,
        typer.Option(
            "--continue",
            envvar="PIPELINERL_RESTARTED",  # which the launcher sets for what it starts again
            help="Go on where a controller of this live run died.",
        ),
    ] = False,
    changes: Changes = None,
) -> None:
    """Issues prompts, owns version, knobs and fleet; ends when the run is over."""
    from pipelinerl.controller.service.service import Start
    from pipelinerl.roles import controller_role

    _start(
        partial(controller_role.run, start=Start.FROM_JOURNAL if go_on else Start.AFRESH),
        _identity(recipe, name, run_dir, redis_url, controller_url, token_file, changes, host=host, port=port),
    )


@app.command(rich_help_panel=ROLES)
def engine(
    recipe: RoleRecipe = "tiny",
    name: Name = "engine-0",
    run_dir: RunDir = None,
    redis_url: RedisUrl = None,
    controller_url: ControllerUrl = LOCAL_CONTROLLER,
    token_file: TokenFile = None,
    host: Host = "127.0.0.1",
    port: Port = 8001,
    type: Annotated[str | None, typer.Option(help="Engine type (default: the recipe's).")] = None,
    model: Annotated[str | None, typer.Option(help="Model directory (default: the recipe's).")] = None,
    changes: Changes = None,
) -> None:
    """An inference server; joins the run of the controller, or serves alone with --controller-url ''."""
    from pipelinerl.roles import engine_role

    chosen = [*(changes or []), *([f"engine.type={type}"] if type else []), *([f"model.path={model}"] if model else [])]
    _start(
        engine_role.run,
        _identity(recipe, name, run_dir, redis_url, controller_url, token_file, chosen, host=host, port=port),
    )


@app.command(rich_help_panel=ROLES)
def parameter_server(
    recipe: RoleRecipe = "tiny",
    name: Name = "parameter-server-0",
    run_dir: RunDir = None,
    redis_url: RedisUrl = None,
    controller_url: ControllerUrl = LOCAL_CONTROLLER,
    token_file: TokenFile = None,
    host: Host = "127.0.0.1",
    port: Port = 8100,
    changes: Changes = None,
) -> None:
    """Holds versions of the weights in memory, for engines to pull (weights.transport=pull)."""
    from pipelinerl.roles import parameter_server_role

    _start(
        parameter_server_role.run,
        _identity(recipe, name, run_dir, redis_url, controller_url, token_file, changes, host=host, port=port),
    )


@app.command(rich_help_panel=ROLES)
def actor(
    recipe: RoleRecipe = "tiny",
    name: Name = "actor-0",
    run_dir: RunDir = None,
    redis_url: RedisUrl = None,
    controller_url: ControllerUrl = LOCAL_CONTROLLER,
    token_file: TokenFile = None,
    changes: Changes = None,
) -> None:
    """Samples prompts at the engines, verifies the answers, streams the groups."""
    from pipelinerl.roles import actor_role

    _start(actor_role.run, _identity(recipe, name, run_dir, redis_url, controller_url, token_file, changes))


@app.command(rich_help_panel=ROLES)
def trainer(
    recipe: RoleRecipe = "tiny",
    name: Name = "trainer",
    run_dir: RunDir = None,
    redis_url: RedisUrl = None,
    controller_url: ControllerUrl = LOCAL_CONTROLLER,
    token_file: TokenFile = None,
    changes: Changes = None,
) -> None:
    """Trains on the streamed groups and publishes weights; goes on from the newest checkpoint of the run."""
    from pipelinerl.roles import trainer_role

    _start(trainer_role.run, _identity(recipe, name, run_dir, redis_url, controller_url, token_file, changes))


def _identity(
    recipe: str,
    name: str,
    run_dir: Path | None,
    redis_url: str | None,
    controller_url: str,
    token_file: Path | None,
    changes: list[str] | None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
) -> Any:
    from pipelinerl.roles.process import Identity, read_token

    config: RunConfig = recipes.load(recipe, changes or [])
    of_recipe = config.streams.redis_url
    return Identity(
        config=config,
        run_dir=run_dir or config.run_directory,
        name=name,
        redis_url=redis_url or (of_recipe.get_secret_value() if of_recipe else LOCAL_REDIS),
        controller_url=controller_url.rstrip("/"),
        token=read_token(token_file),
        host=host,
        port=port,
    )


def _start(role: Any, identity: Any) -> None:
    from pipelinerl.roles.process import run_until_signalled

    run_until_signalled(role, identity)


def _assignment(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not (separator and name.strip()):
        raise RecipeError(f"expected knob=value, got {text!r}")
    return name.strip(), value.strip()


def main() -> None:
    """Entry point."""
    try:
        app(prog_name="pipelinerl")
    except UserError as error:
        print(f"pipelinerl: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except PipelineError as error:
        print(f"pipelinerl: {type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
