"""The commands `pipelinerl bench` and `chaos`, which run code that exists only in a checkout of the repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from pipelinerl.errors import UserError

_CHECKOUT: Final = Path(__file__).resolve().parents[2]


def bench(
    name: Annotated[str, typer.Argument(help="A benchmark's name, or `all`.")] = "all",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds and sizes.")] = False,
) -> None:
    """Run benchmarks and write their records (needs a checkout)."""
    raise typer.Exit(run_in_checkout("benchmarks", name, *(["--quick"] if quick else []), what="benchmarks are"))


def chaos(
    seed: Annotated[int, typer.Option(help="Seed that determines what dies and when.")] = 0,
    scenario: Annotated[str, typer.Option(help="A scenario's name, or `all`.")] = "all",
    count: Annotated[int, typer.Option(min=1, help="Number of seeds, starting at --seed.")] = 1,
    list_only: Annotated[bool, typer.Option("--list", help="List the scenarios.")] = False,
) -> None:
    """Kill, fence and starve seeded runs, and check that nothing is lost (needs a checkout)."""
    words = ["--seed", str(seed), "--scenario", scenario, "--count", str(count), *(["--list"] if list_only else [])]
    raise typer.Exit(run_in_checkout("tests.faults.scenarios", *words, what="the fault scenarios are"))


def run_in_checkout(module: str, *words: str, what: str) -> int:
    """Run `python -m module words…` and return its exit status.

    `what` is the subject and verb of the error message, such as "benchmarks are".

    Raises:
        UserError: this package is not in a checkout.
    """
    if not _CHECKOUT.joinpath(*module.split("."), "__main__.py").is_file():
        raise UserError(
            f"{what} part of a checkout, and {_CHECKOUT} is not one; clone the repository, run `make install` and "
            "use its command"
        )
    return subprocess.call([sys.executable, "-m", module, *words], cwd=_CHECKOUT)
