"""`pipelinerl chaos` runs the fault scenarios of the repository checkout, and fails with a message outside of one."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from pipelinerl import cli
from tests.faults.scenarios.scenario import names


def test_chaos_command_lists_every_fault_scenario(capfd: pytest.CaptureFixture[str]) -> None:
    done = CliRunner().invoke(cli.app, ["chaos", "--list"])
    listed = capfd.readouterr().out.splitlines()
    assert done.exit_code == 0
    assert [line.split()[0] for line in listed] == names()
    assert all(line.endswith(".") for line in listed)


def test_chaos_command_runs_a_scenario_with_the_given_seeds_and_counts_failures(capfd):
    done = CliRunner().invoke(cli.app, ["chaos", "--scenario", "starved", "--seed", "3", "--count", "2"])
    assert done.exit_code == 0
    assert capfd.readouterr().out.startswith("starved: 2 situations, 0 hung, 0 named wrongly (seeds 3 to 4, ")


def test_chaos_command_rejects_an_unknown_scenario_and_lists_the_known_ones(capfd: pytest.CaptureFixture[str]) -> None:
    assert CliRunner().invoke(cli.app, ["chaos", "--scenario", "zzz"]).exit_code == 2
    assert "no scenario is called 'zzz'; there are: bad_machine, controller_killed, " in capfd.readouterr().err
