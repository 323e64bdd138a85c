"""The options that the command of every role has, declared once, and what a role's process is made of them.

    @role_command(app, name="actor-0")
    def actor(options: RoleOptions) -> None: …

makes a command with these options, then those that the function declares beside `options`, then `--set`.

A password on a role's command line is in every user's process list; in the environment it is not. A role that is given
one that way starts itself again at once (`hide_password`), as the same process, with the address in
`$PIPELINERL_REDIS_URL`. Until then, some tenths of a second, and in the shell's history, it is seen all the same.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import typer

from pipelinerl.config import recipe as recipes
from pipelinerl.observability.redaction import without_secrets

if TYPE_CHECKING:  # it imports the streams, for which `pipelinerl --help` need not wait
    from pipelinerl.roles.process import Identity

ROLES: Final = "Roles (each is one process; `run` starts them all)"
LOCAL_REDIS: Final = "redis://127.0.0.1:6379/0"
LOCAL_CONTROLLER: Final = "http://127.0.0.1:8000"
_REDIS_OPTION: Final = "--redis-url"
#: Where a password is in nobody's process list.
_REDIS_VARIABLE: Final = "PIPELINERL_REDIS_URL"

RoleRecipe = Annotated[str, typer.Option("--recipe", help="Recipe of the run; the same for every role.")]
Changes = Annotated[list[str] | None, typer.Option("--set", help="Change of the recipe: section.key=value.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleOptions:
    """Which run a role belongs to, what it is called, where its peers are, and where it listens itself."""

    recipe: RoleRecipe = "tiny"
    name: Annotated[str, typer.Option("--name", help="This process' name; unique within the run.")]
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="The run's directory (default: by the recipe).")] = (
        None
    )
    redis_url: Annotated[
        str | None,
        typer.Option(
            _REDIS_OPTION,
            envvar=_REDIS_VARIABLE,
            help="Where the streams are (default: by the recipe, else redis://127.0.0.1:6379/0).",
        ),
    ] = None
    controller_url: Annotated[str, typer.Option("--controller-url", help="Where the controller is.")] = LOCAL_CONTROLLER
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="Bearer token (default: $PIPELINERL_TOKEN, else the run directory's)."),
    ] = None
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Serve every program of this machine, without a token.")
    ] = False
    host: Annotated[str, typer.Option("--host", help="Address to bind.")] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", help="Port to bind.")] = 0
    changes: Changes = None

    def identity(self, changes: Sequence[str] = ()) -> Identity:
        """What the process is told of itself, by the recipe with `changes` after those of the command line.

        Raises:
            RecipeError, UserError: the recipe or the token file cannot be used.
        """
        from pipelinerl.commands.memory.machine_defaults import settled
        from pipelinerl.roles.process import Identity, token_of

        config = settled(recipes.load(self.recipe, [*(self.changes or []), *changes]))
        of_recipe, run_dir = config.streams.redis_url, self.run_dir or config.run_directory
        return Identity(
            config=config,
            run_dir=run_dir,
            name=self.name,
            redis_url=self.redis_url or (of_recipe.get_secret_value() if of_recipe else LOCAL_REDIS),
            controller_url=self.controller_url.rstrip("/"),
            token=None if self.no_token else token_of(self.token_file, run_dir),
            host=self.host,
            port=self.port,
        )

    def run(self, role: Callable[[Identity], Coroutine[Any, Any, None]], *, changes: Sequence[str] = ()) -> None:
        """Run `role` until its work is done or a signal stops it; the exit status says which."""
        from pipelinerl.roles.process import run_until_signalled

        run_until_signalled(role, self.identity(changes))


def role_command(app: typer.Typer, *, name: str, port: int | None = None) -> Callable[[Callable[..., None]], Any]:
    """Register the decorated function, which takes `RoleOptions` and its own options, as the command of a role.

    `name` is the process' name by default. A role without a `port` listens nowhere, and has neither `--host` nor
    `--port`.
    """
    defaults = {"name": name} | ({} if port is None else {"port": port})
    left_out = frozenset({"host", "port"} if port is None else ())

    def register(function: Callable[..., None]) -> Any:
        common = _parameters(defaults, left_out)
        own = [
            each for each in inspect.signature(function, eval_str=True).parameters.values() if each.name != "options"
        ]
        parameters = [*common[:-1], *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own), common[-1]]
        shared = {each.name for each in common}

        @wraps(function)
        def command(**values: Any) -> None:
            options = RoleOptions(**{key: value for key, value in values.items() if key in shared})
            function(options, **{key: value for key, value in values.items() if key not in shared})

        described: Any = command
        described.__signature__ = inspect.Signature(parameters)
        described.__annotations__ = {each.name: each.annotation for each in parameters}
        return app.command(rich_help_panel=ROLES)(described)

    return register


def _parameters(defaults: dict[str, Any], left_out: frozenset[str]) -> list[inspect.Parameter]:
    """The fields of `RoleOptions` as the parameters of a command; the last is `changes`."""
    hints = get_type_hints(RoleOptions, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(field.name, field.default),
            annotation=hints[field.name],
        )
        for field in fields(RoleOptions)
        if field.name not in left_out
    ]


def hide_password() -> None:
    """Replace this process by one whose arguments hold no password, if its own do; else return."""
    moved = without_password(sys.orig_argv, os.environ)
    if moved is not None:
        arguments, environment = moved
        os.execve(sys.executable, [sys.executable, *arguments[1:]], dict(environment))


def without_password(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]] | None:
    """Arguments and environment that say the same, with the address where nobody sees it; None for harmless ones."""
    kept, address, rest = list[str](), "", iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name == _REDIS_OPTION:
            value = value if equals else next(rest, "")
            if value != without_secrets(value):
                address = value
                continue
            kept += [argument] if equals else [argument, value]
        else:
            kept.append(argument)
    return (kept, {**environment, _REDIS_VARIABLE: address}) if address else None
