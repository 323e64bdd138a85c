"""The commands `pipelinerl oubliette …`: what sandbox this machine has, and a program run in it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.errors import UserError
from pipelinerl.verifiers.oubliette import probe, toolchains
from pipelinerl.verifiers.oubliette.runs import Limits, SandboxLost, SandboxMissing, Tier
from pipelinerl.verifiers.oubliette.sandbox import Sandbox, walls_of

oubliette_app = typer.Typer(help="The sandbox that judges code: try it, or run a program in it.", no_args_is_help=True)

Which = Annotated[Tier, typer.Option("--tier", help="The sandbox; nothing below it is taken.")]


@oubliette_app.command("probe")
def probe_(
    tier: Which = Tier.DEFAULT,
    all_: Annotated[bool, typer.Option("--all", help="A line for each attack.")] = False,
) -> None:
    """Attack the sandbox from within, by every attack that there is; exit status 1 if one is not held off."""
    for each in Tier:
        typer.echo(f"{each:<10} {_told(each)}")
    typer.echo(f"{'languages':<10} {', '.join(toolchains.installed())}")
    found = probe.attacked(lambda number: walls_of(tier, number), probe.ATTACKS)
    for finding in found:
        if all_ or finding.defence is not probe.Defence.HELD:
            typer.echo(f"{finding.defence.value:<10} {finding.name}: {finding.told}")
    held = sum(finding.defence is probe.Defence.HELD for finding in found)
    left_out = sum(finding.defence is probe.Defence.LEFT_OUT for finding in found)
    typer.echo(f"{tier} sandbox: {held} of {len(found) - left_out} attacks held off, {left_out} left out")
    if held + left_out < len(found):
        raise typer.Exit(1)


@oubliette_app.command("run")
def run_(
    program: Annotated[Path, typer.Argument(help="The program's source.")],
    language: Annotated[str | None, typer.Option(help="By default, what the file's name ends with.")] = None,
    input_: Annotated[Path | None, typer.Option("--input", help="What it reads; by default nothing.")] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds of processor time.")] = 10.0,
    memory_mb: Annotated[int, typer.Option(help="Memory of all its processes together.")] = 512,
    tier: Which = Tier.DEFAULT,
) -> None:
    """Run a program in the sandbox; its output is shown, and how it ended. Exit status 1 if it did not end well."""
    try:
        source, stdin = program.read_text(), b"" if input_ is None else input_.read_bytes()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{program} cannot be read: {error}") from None
    found = toolchains.find(language or program.suffix.lstrip("."))
    limits = Limits(cpu_s=time_limit, wall_s=2 * time_limit + 1, memory_bytes=memory_mb << 20)
    sandbox = probe.opened(tier, at_once=1)
    try:
        succeeded = _ran(sandbox, found, source, stdin, limits)
    except SandboxLost as error:
        raise UserError(f"the sandbox was lost: {error}") from None
    finally:
        sandbox.close()
    if not succeeded:
        raise typer.Exit(1)


def _ran(sandbox: Sandbox, language: toolchains.Toolchain, source: str, stdin: bytes, limits: Limits) -> bool:
    compiling = language.compiling(source, toolchains.COMPILING)
    program = source.encode()
    if compiling is not None:
        compiled = sandbox.run(compiling)
        program = compiled.stdout
        if not compiled.succeeded:
            sys.stderr.write(compiled.stderr.decode("utf-8", "replace"))
            typer.echo(f"it does not compile: {compiled.describe()}", err=True)
            return False
    result = sandbox.run(language.running(program, stdin, limits))
    sys.stdout.write(result.stdout.decode("utf-8", "replace"))
    sys.stderr.write(result.stderr.decode("utf-8", "replace"))
    used = f"{result.cpu_s:.2f} s of processor time, {result.wall_s:.2f} s on the clock"
    typer.echo(f"{result.describe()} ({used}, {result.tier} sandbox)", err=True)
    return result.succeeded


def _told(tier: Tier) -> str:
    try:
        probe.opened(tier, at_once=1).close()
    except SandboxMissing as error:
        return f"not here: {error}"
    return "holds off the attacks that are tried at each start"
