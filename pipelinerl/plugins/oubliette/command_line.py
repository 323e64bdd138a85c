"""The commands `pipelinerl sandbox …`: test the sandbox, run programs in it, upload tests, serve it.

Each command imports the sandbox lazily, because every process of a run imports this file.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TextIO

import typer

from pipelinerl.errors import UserError
from pipelinerl.observability.samples import visible
from pipelinerl.plugins.oubliette.runs import Limits, SandboxLost, SandboxMissing, Tier
from pipelinerl.plugins.oubliette.section import OublietteSection
from pipelinerl.roles.role import LISTEN_HELP

oubliette_app = typer.Typer(
    help="Test the code sandbox, run programs in it, serve it, upload tests.", no_args_is_help=True
)

Where = Annotated[str, typer.Option("--url", help="URL of an Oubliette service (default: this machine).")]
Key = Annotated[str, typer.Option("--key-variable", help="Environment variable with the service's token.")]
Which = Annotated[Tier, typer.Option("--tier", help="Minimum tier of the sandbox.")]


@oubliette_app.command("probe")
def probe_(
    tier: Which = Tier.DEFAULT,
    all_: Annotated[bool, typer.Option("--all", help="Show a line for each attack.")] = False,
) -> None:
    """Test the sandbox with every known attack from inside; exit status 1 if one succeeds."""
    from pipelinerl.plugins.oubliette import control_groups, probe, toolchains
    from pipelinerl.plugins.oubliette.attacks import ATTACKS
    from pipelinerl.plugins.oubliette.sandbox import isolation_of

    for each in Tier:
        availability = "withstands the attacks that are tried at each start"
        try:
            probe.opened(each, at_once=1).close()
        except SandboxMissing as error:
            availability = f"unavailable: {error}"
        typer.echo(f"{each:<10} {availability}")
    groups = control_groups.available()
    description = f"none: {groups}" if isinstance(groups, str) else f"version {groups.version}, one for each slot"
    typer.echo(f"{'groups':<10} {description}")
    typer.echo(f"{'languages':<10} {', '.join(toolchains.installed())}")
    findings = probe.attacked(lambda number: isolation_of(tier, number), ATTACKS)
    for finding in findings:
        if all_ or finding.defence is not probe.Defence.HELD:
            typer.echo(f"{finding.defence.value:<10} {finding.name}: {finding.detail}")
    held = sum(finding.defence is probe.Defence.HELD for finding in findings)
    left_out = sum(finding.defence is probe.Defence.LEFT_OUT for finding in findings)
    typer.echo(f"{tier} sandbox: {held} of {len(findings) - left_out} attacks withstood, {left_out} left out")
    if held + left_out < len(findings):
        raise typer.Exit(1)


@oubliette_app.command("run")
def run_(
    program: Annotated[Path, typer.Argument(help="The program's source.")],
    language: Annotated[str | None, typer.Option(help="Language (default: by the file's suffix).")] = None,
    inputs: Annotated[
        list[Path] | None, typer.Option("--input", help="Input files, one run each (default: one run without input).")
    ] = None,
    time_limit: Annotated[float, typer.Option(help="CPU time in seconds.")] = 10.0,
    memory_mb: Annotated[int, typer.Option(help="Memory of all its processes together, in MB.")] = 512,
    tier: Which = Tier.DEFAULT,
    url: Where = "",
    key_variable: Key = "",
) -> None:
    """Run a program in the sandbox, here or at a service, and show its outputs and how it ended.

    Exit status 1 if it did not compile or did not end normally.
    """
    from pipelinerl.plugins.oubliette import toolchains
    from pipelinerl.plugins.oubliette.repository import ContentMissing

    try:
        source, read = program.read_text(), [file.read_bytes() for file in inputs or ()] or [b""]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{program} or an input cannot be read: {error}") from None
    toolchain = toolchains.named(language or program.suffix.lstrip("."))
    if toolchain is None:
        given = language or program.suffix or "a file without a suffix"
        raise UserError(f"--language must be one of {', '.join(toolchains.LANGUAGES)}, got {given}")
    limits = Limits(cpu_s=time_limit, wall_s=2 * time_limit + 1, memory_bytes=memory_mb << 20)
    rules = OublietteSection(tier=tier, url=url, key_variable=key_variable)
    try:
        succeeded = asyncio.run(_ran(rules, toolchain.name, source, read, limits))
    except (SandboxLost, ContentMissing) as error:
        raise UserError(f"the program could not be run: {error}") from None
    if not succeeded:
        raise typer.Exit(1)


def _write(to: TextIO, output: bytes) -> None:
    """Write a program's output unchanged to a file or pipe, and without effective escape sequences to a terminal."""
    text = output.decode("utf-8", "replace")
    to.write(visible(text) if to.isatty() else text)


async def _ran(rules: OublietteSection, language: str, source: str, inputs: Sequence[bytes], limits: Limits) -> bool:
    from pipelinerl.plugins.oubliette import toolchains
    from pipelinerl.plugins.oubliette.runner import Program
    from pipelinerl.plugins.oubliette.verifier import open_runner
    from pipelinerl.verifiers.worker_pool import num_cores

    runner = await open_runner(rules, at_once=min(len(inputs), num_cores()))
    try:
        program = await runner.compile(language, source, wall_s=toolchains.COMPILING.wall_s)
        if not isinstance(program, Program):
            _write(sys.stderr, program.stderr)
            typer.echo(f"it does not compile: {program.describe()} ({runner.tier} sandbox)", err=True)
            return False
        runs = await asyncio.gather(*(runner.run(program, stdin, limits) for stdin in inputs))
        for each in runs:
            _write(sys.stdout, await runner.read(each.output))
            _write(sys.stderr, each.result.stderr)
            used = f"{each.result.cpu_s:.2f} s of CPU time, {each.result.wall_s:.2f} s of wall time"
            typer.echo(f"{each.result.describe()} ({used}, {runner.tier} sandbox)", err=True)
        return all(each.result.succeeded for each in runs)
    finally:
        await runner.close()


@oubliette_app.command("upload")
def upload_(
    files: Annotated[list[Path], typer.Argument(help="Problems with tests: JSON lines, JSON, CSV, Parquet.")],
    out: Annotated[Path, typer.Option(help="Output file: the rows with links instead of tests, as JSON lines.")],
    repository: Annotated[Path | None, typer.Option(help="A local folder, instead of --url.")] = None,
    answer_field: Annotated[
        str, typer.Option(help="Field with the tests, if it is none of the known ones.")
    ] = "answer",
    tier: Which = Tier.DEFAULT,
    url: Where = "",
    key_variable: Key = "",
) -> None:
    """Upload inputs, answers and compiled checkers to a repository; --out is then the data file for a recipe."""
    from pipelinerl.plugins.oubliette.upload import upload

    if (repository is None) == (not url):
        raise UserError("upload needs either --url, of a service, or --repository, a folder")
    rules = OublietteSection(tier=tier, url=url, key_variable=key_variable, repository=str(repository or ""))
    try:
        done = asyncio.run(upload(files, out, rules, answer_field=answer_field))
    except (SandboxLost, OSError) as error:
        raise UserError(f"the upload ended early: {error}") from None
    before, after = sum(file.stat().st_size for file in files), out.stat().st_size
    typer.echo(f"{done.rows} problems written to {out}; {done.contents} contents uploaded, {done.num_bytes} bytes")
    typer.echo(f"{before} bytes of files are {after} with links")
    for reason in done.reasons:
        typer.echo(f"left out: {reason}", err=True)
    if done.left_out:
        typer.echo(f"{done.left_out} problems were left out", err=True)
    if not done.rows:
        raise typer.Exit(1)


@oubliette_app.command("serve")
def serve_(
    repository: Annotated[Path, typer.Option(help="The folder of inputs, answers and compiled checkers.")],
    host: Annotated[str, typer.Option(help=LISTEN_HELP)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8300,
    tier: Which = Tier.DEFAULT,
    at_once: Annotated[int | None, typer.Option(min=1, help="Concurrent programs (default: one per core).")] = None,
    key_variable: Key = "",
    transient_mb: Annotated[int, typer.Option(min=1, help="Memory for outputs, in MB.")] = 1024,
) -> None:
    """Serve the sandbox over HTTP: compile, run and check programs; refuses to start below the requested tier."""
    from pipelinerl.plugins.oubliette import probe
    from pipelinerl.plugins.oubliette.remote.service import OublietteService, create_app
    from pipelinerl.plugins.oubliette.repository import PersistentRepository, TransientRepository
    from pipelinerl.plugins.oubliette.runner import LocalRunner
    from pipelinerl.system.http_service import listen, serve, url_of
    from pipelinerl.verifiers.worker_pool import num_cores

    token = os.environ.get(key_variable) if key_variable else None
    if key_variable and not token:
        raise UserError(f"--key-variable names ${key_variable}, which is not set in this environment")
    slots = at_once or num_cores()
    persistent, transient = PersistentRepository(repository), TransientRepository(transient_mb << 20)
    with listen(host, port) as listener:
        sandbox = probe.opened(tier, at_once=slots)
        runner = LocalRunner(sandbox, tier=str(tier), at_once=slots, repository=persistent, outputs=transient)
        service = OublietteService(runner, tier=tier, persistent=persistent, transient=transient)
        bound, taken = listener.getsockname()[:2]
        print(f"oubliette: the {tier} sandbox at {url_of(bound, taken)}", flush=True)
        try:
            serve(create_app(service, token=token), listener)
        finally:
            asyncio.run(service.close())
