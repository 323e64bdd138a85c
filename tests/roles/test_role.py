"""Tests of `Role`, which describes one kind of process for both its command line and the arguments of the launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from pipelinerl import registry
from pipelinerl.roles.catalogue import ROLES, role_of
from pipelinerl.roles.role import Role, RoleOptions

GIVEN = RoleOptions(
    name="judge-1",
    run_dir=Path("/runs/x"),
    redis_url="redis://10.0.0.1:1/0",
    controller_url="http://10.0.0.1:2",
    token_file=Path("/runs/x/tokens.json"),
    no_token=True,
    host="10.0.0.2",
    port=3,
    changes=["run.steps=2", "engine.options={}"],
)


def parsed(**described: Any) -> tuple[Role, list[tuple[RoleOptions, object]]]:
    """Return a role with one extra option, and a list to which each call of its command appends the options it got."""
    calls: list[tuple[RoleOptions, object]] = []

    def judge(options: RoleOptions, domain: Annotated[list[str] | None, typer.Option()] = None) -> None:
        calls.append((options, domain))

    return Role(judge, name="judge-0", port=9000, stop_order=0, **described), calls


def run(role: Role, words: list[str]) -> None:
    app = typer.Typer()
    app.command(role.subcommand)(role.command)
    result = CliRunner().invoke(app, words[1:])
    assert result.exit_code == 0, result.output


def test_arguments_that_the_launcher_builds_for_a_process_are_parsed_to_the_same_options() -> None:
    judge, calls = parsed()
    run(judge, judge.arguments(GIVEN, domain=["a", "b"]))
    assert calls == [(GIVEN, ["a", "b"])]


def test_command_of_a_process_without_arguments_uses_its_defaults() -> None:
    judge, calls = parsed()
    run(judge, ["judge"])
    assert calls == [(RoleOptions(name="judge-0", port=9000), None)]
    assert judge.numbered(4) == "judge-4"


def test_launcher_passes_only_the_options_that_a_process_accepts() -> None:
    judge, _ = parsed(takes=frozenset({"recipe", "changes"}))
    words = judge.arguments(GIVEN, domain=None)
    assert words == ["judge", "--set", "run.steps=2", "--set", "engine.options={}"]


@pytest.mark.parametrize("role", [*ROLES, *registry.ROLES.values()], ids=lambda role: role.subcommand)
def test_every_process_of_a_run_has_a_command_with_help(role: Role) -> None:
    assert role.main.__doc__ and role.parameters[-1].name == "changes"
    assert role.arguments(RoleOptions(name="x"))[0] == role.subcommand
    assert role_of(role.subcommand) is role
