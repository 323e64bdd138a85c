"""The command `pipelinerl chaos`, which `cli` registers: plays the fault scenarios that lie in a checkout's tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.errors import UserError

_CHECKOUT = Path(__file__).resolve().parents[2]
_SCENARIOS = "tests.faults.scenarios"


def chaos(
    seed: Annotated[int, typer.Option(help="What dies, and when, follows from it.")] = 0,
    scenario: Annotated[str, typer.Option(help="A scenario's name, or `all`.")] = "all",
    count: Annotated[int, typer.Option(min=1, help="How many seeds, from --seed on.")] = 1,
    list_only: Annotated[bool, typer.Option("--list", help="Say which scenarios there are.")] = False,
) -> None:
    """Kill, fence and starve runs by seed, and check that nothing is lost (from a checkout)."""
    if not _CHECKOUT.joinpath(*_SCENARIOS.split("."), "__main__.py").is_file():
        raise UserError(
            f"the fault scenarios are part of a checkout, and {_CHECKOUT} is none: clone the repository, "
            "`make install` there, and run this from it"
        )
    words = ["--seed", str(seed), "--scenario", scenario, "--count", str(count), *(["--list"] if list_only else [])]
    raise typer.Exit(subprocess.call([sys.executable, "-m", _SCENARIOS, *words], cwd=_CHECKOUT))
