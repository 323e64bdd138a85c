"""`Role`: a description of one kind of process, shared by the command line and the launcher.

    @partial(Role, name="engine-0", port=8001, stop_order=2)
    def engine(options: RoleOptions, type: Annotated[str | None, typer.Option(help="…")] = None) -> None:
        from pipelinerl.roles import engine_role
        …

`engine.command` is the function behind `pipelinerl engine`; `engine.arguments(options, type="torch")` are the arguments
with which the launcher starts the same process. Both come from the fields of `RoleOptions` and from the parameters of
the decorated function. Creating a `Role` imports nothing heavy: only the function imports what it runs.

A password on a command line shows up in every user's process list; one in the environment does not. A role whose
`--redis-url` holds a password therefore re-executes itself immediately (`hide_password`) and passes the address in
`$PIPELINERL_REDIS_URL`. The password is still visible for some tenths of a second, and in the shell's history.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from pipelinerl.observability.logs import without_secrets

LOCAL_REDIS: Final = "redis://127.0.0.1:6379/0"
_REDIS_OPTION: Final = "--redis-url"

#: Environment variable with the address of the streams, password included. A role without `--redis-url` uses this
#: address, even if the recipe has another one.
REDIS_VARIABLE: Final = "PIPELINERL_REDIS_URL"
#: Environment variable with the path of the password file of an embedded server, for roles on other hosts than the
#: server. The launcher sets it.
REDIS_PASSWORD_VARIABLE: Final = "PIPELINERL_REDIS_PASSWORD_FILE"
#: Environment variable that the launcher sets for a process that it restarts while the run continues.
RESTARTED_VARIABLE: Final = "PIPELINERL_RESTARTED"

#: Help of `--host`, which means the same in all commands that have it.
LISTEN_HELP: Final = "Address to listen on, where others reach it; any but loopback is open to the network."

RoleRecipe = Annotated[str, typer.Option("--recipe", help="Recipe of the run; the same for every role.")]
# Arguments of commands.
Recipe = Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped recipe.")]
RunPath = Annotated[Path, typer.Argument(help="Directory of the run, such as runs/tiny.")]
Run = Annotated[
    str,
    typer.Argument(
        help="Directory of the run, such as runs/tiny; or its controller's URL, with the token in $PIPELINERL_TOKEN."
    ),
]
Overrides = Annotated[list[str] | None, typer.Argument(help="Changes to the recipe: section.key=value …")]
Changes = Annotated[list[str] | None, typer.Option("--set", help="Change of the recipe: section.key=value.")]


def joined(*changes: list[str] | None) -> list[str]:
    """Return the changes of a command line as one list: those given as arguments, then those given with `--set`."""
    return [change for part in changes for change in part or []]


class OnExit(StrEnum):
    """The launcher's reaction to the end of a process. After exit status 2, a user error, nothing is restarted."""

    RESTART = "restart"
    """Restart the process, within its restart budget."""
    DONE = "done"
    """Exit status 0: its work is done, and the run continues without it. Any other status: restart it."""
    COMPLETE = "complete"
    """Exit status 0: the whole run is complete. Any other status: restart the process."""
    SPARE = "spare"
    """Restart the process within its restart budget; once that is spent, the run continues without the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleOptions:
    """The options that all roles have: the recipe and run, the process's name, its peers' addresses, and its own."""

    recipe: RoleRecipe = "tiny"
    name: Annotated[str, typer.Option("--name", help="Name of this process, unique within the run.")]
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="The run's directory (default: by the recipe).")] = (
        None
    )
    redis_url: Annotated[
        str | None,
        typer.Option(
            _REDIS_OPTION,
            envvar=REDIS_VARIABLE,
            help="Address of the streams (default: by the recipe, else redis://127.0.0.1:6379/0).",
        ),
    ] = None
    controller_url: Annotated[str, typer.Option("--controller-url", help="URL of the controller.")] = (
        "http://127.0.0.1:8000"
    )
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="Bearer token (default: $PIPELINERL_TOKEN, else the run directory's)."),
    ] = None
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Serve every program on this machine without a token.")
    ] = False
    host: Annotated[str, typer.Option("--host", help=LISTEN_HELP)] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 takes a free one.")] = 0
    changes: Changes = None


_COMMON: Final = {field.name: field.default for field in fields(RoleOptions)}


@dataclass(frozen=True)
class Role:
    """One kind of process of a run.

    Attributes:
        main: runs the process; takes `RoleOptions`, then the role's own options. Its docstring is the command's help.
        name: default of `--name`.
        stop_order: processes with a lower number are stopped earlier.
        port: default of `--port`; None for a role that does not listen, which has neither `--host` nor `--port`.
        takes: names of the fields of `RoleOptions` that are options of this role.
        after: names of processes that must be healthy before the launcher starts this one.
    """

    main: Callable[..., None]
    name: str
    stop_order: int
    port: int | None = None
    takes: frozenset[str] = frozenset(_COMMON)
    after: tuple[str, ...] = ("controller",)
    on_exit: OnExit = OnExit.RESTART

    @property
    def subcommand(self) -> str:
        """The subcommand of `pipelinerl` that runs this role."""
        return self.main.__name__.replace("_", "-")

    def numbered(self, number: int) -> str:
        """Return the name of this role's process with this number, such as `engine-0`."""
        return f"{self.subcommand}-{number}"

    @cached_property
    def parameters(self) -> tuple[inspect.Parameter, ...]:
        """The command's options: the options that all roles share, then the role's own, then the recipe's `changes`."""
        hints = get_type_hints(RoleOptions, include_extras=True)
        taken = self.takes - ({"host", "port"} if self.port is None else set())
        defaults = {**_COMMON, "name": self.name, "port": self.port}
        *common, changes = (
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hints[name])
            for name in _COMMON
            if name in taken
        )
        _, *own = inspect.signature(self.main, eval_str=True).parameters.values()
        return (*common, *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own), changes)

    @property
    def command(self) -> Callable[..., None]:
        """The function that typer calls for the subcommand: it runs the process; its signature lists the options."""

        def command(**values: Any) -> None:
            common = {key: values.pop(key) for key in _COMMON if key in values}
            self.main(RoleOptions(**{"name": self.name, **common}), **values)

        described: Any = command
        described.__doc__ = self.main.__doc__
        described.__signature__ = inspect.Signature(self.parameters)
        described.__annotations__ = {each.name: each.annotation for each in self.parameters}
        return command

    def arguments(self, options: RoleOptions, **own: object) -> list[str]:
        """Return the `pipelinerl` arguments that start this role with these options; default values are left out."""
        words = [self.subcommand]
        for parameter in self.parameters:
            name, default = parameter.name, _COMMON.get(parameter.name, parameter.default)
            value = getattr(options, name) if name in _COMMON else own.get(name)
            if value is None or value == default:
                continue
            for each in value if isinstance(value, list) else [value]:
                words += [_flag(parameter)] if each is True else [_flag(parameter), str(each)]
        return words


def _flag(parameter: inspect.Parameter) -> str:
    # Derive the option's name as typer does: `option.default` holds the name if the annotation gives one.
    (option,) = parameter.annotation.__metadata__
    return option.default if isinstance(option.default, str) else f"--{parameter.name.replace('_', '-')}"


def hide_password() -> None:
    """Restart this process without the password in its arguments; do nothing if they contain no password."""
    moved = without_password(sys.orig_argv, os.environ)
    if moved is not None:
        arguments, environment = moved
        os.execve(sys.executable, [sys.executable, *arguments[1:]], dict(environment))


def without_password(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]] | None:
    """Return arguments and environment with the password moved to the environment; None if there is no password."""
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
    return (kept, {**environment, REDIS_VARIABLE: address}) if address else None
