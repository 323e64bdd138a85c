"""A role's command line and the launcher's arguments come from one description, so they always match."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from pipelinerl.roles.catalogue import ROLES
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
    """Return a role that has an option of its own, and a list to which each run of its command appends its options."""
    calls: list[tuple[RoleOptions, object]] = []

    def judge(options: RoleOptions, domain: Annotated[list[str] | None, typer.Option()] = None) -> None:
        calls.append((options, domain))

    return Role(judge, name="judge-0", port=9000, stop_order=0, **described), calls


def run(role: Role, words: list[str]) -> None:
    app = typer.Typer()
    app.command(role.subcommand)(role.command)
    result = CliRunner().invoke(app, words[1:])
    assert result.exit_code == 0, result.output


def test_role_arguments_parse_back_to_the_same_options() -> None:
    judge, calls = parsed()
    run(judge, judge.arguments(GIVEN, domain=["a", "b"]))
    assert calls == [(GIVEN, ["a", "b"])]


def test_role_command_without_arguments_has_the_roles_defaults() -> None:
    judge, calls = parsed()
    run(judge, ["judge"])
    assert calls == [(RoleOptions(name="judge-0", port=9000), None)]
    assert judge.numbered(4) == "judge-4"


def test_role_arguments_omit_options_that_the_role_does_not_take() -> None:
    judge, _ = parsed(takes=frozenset({"recipe", "changes"}))
    words = judge.arguments(GIVEN, domain=None)
    assert words == ["judge", "--set", "run.steps=2", "--set", "engine.options={}"]


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.subcommand)
def test_every_role_has_a_command_with_help(role: Role) -> None:
    assert role.main.__doc__ and role.parameters[-1].name == "changes"
    assert role.arguments(RoleOptions(name="x"))[0] == role.subcommand
