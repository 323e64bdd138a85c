"""The layout of a run's directory and streams, as a number in the file `layout` beside the recipe.

It grows whenever what lies there takes another name or shape, so that a run which another version of the project began
is refused with a sentence and never misread. A directory with a recipe and no such file is of layout 1.

| layout | what it changed |
|---|---|
| 1 | directives lie in the stream `orders`; the journal's snapshot holds the state in one flat record |
| 2 | directives lie in the stream `directives`; the snapshot holds the state in parts, and its layout |
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pipelinerl.errors import UserError

LAYOUT: Final = 2
_FILE: Final = "layout"


def write_layout(run_dir: Path) -> None:
    """Note in the directory of a run that begins that it is of this layout."""
    (run_dir / _FILE).write_text(f"{LAYOUT}\n")


def check_layout(run_dir: Path) -> None:
    """Return when the directory holds no run yet, or one of this layout.

    Raises:
        UserError: it holds a run that another version of the project began.
    """
    if not (run_dir / "recipe.toml").is_file():
        return
    try:
        found = (run_dir / _FILE).read_text().strip()
    except FileNotFoundError:
        found = "1"
    if found != str(LAYOUT):
        raise UserError(refusal_of(f"the run in {run_dir}", found))


def refusal_of(what: str, found: object) -> str:
    """Why what is of another layout is not read, and what to do."""
    return (
        f"{what} must be of layout {LAYOUT}, got layout {found}: another version of pipelinerl began it; use that "
        "version for it, or begin a new run"
    )
