"""The command `pipelinerl chaos`, which `cli` registers: plays the fault scenarios that lie in a checkout's tests."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelinerl.commands.from_checkout import run_in_checkout


def chaos(
    seed: Annotated[int, typer.Option(help="What dies, and when, follows from it.")] = 0,
    scenario: Annotated[str, typer.Option(help="A scenario's name, or `all`.")] = "all",
    count: Annotated[int, typer.Option(min=1, help="How many seeds, from --seed on.")] = 1,
    list_only: Annotated[bool, typer.Option("--list", help="Say which scenarios there are.")] = False,
) -> None:
    """Kill, fence and starve runs by seed, and check that nothing is lost (from a checkout)."""
    words = ["--seed", str(seed), "--scenario", scenario, "--count", str(count), *(["--list"] if list_only else [])]
    raise typer.Exit(run_in_checkout("tests.faults.scenarios", *words, what="the fault scenarios are"))
