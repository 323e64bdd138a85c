"""The command `pipelinerl mismatch`, which `cli` registers: reads the arguments, and imports what does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def mismatch(
    run_dir: Annotated[Path, typer.Argument(help="Directory of the run, such as runs/tiny.")],
    json: Annotated[bool, typer.Option("--json", help="Every figure and the advice, for programs.")] = False,
) -> None:
    """How far trainer and sampler are apart, by cause, and what to do about it; draws mismatch.png."""
    from rich.console import Console

    from pipelinerl.commands.mismatch import show

    show(run_dir, Console(soft_wrap=json), as_json=json)
