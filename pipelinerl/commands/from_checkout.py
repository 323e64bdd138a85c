"""What is part of a checkout, and not of the installed package, is run from there: tests and benchmarks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from pipelinerl.errors import UserError

_CHECKOUT: Final = Path(__file__).resolve().parents[2]


def run_in_checkout(module: str, *words: str, what: str) -> int:
    """`python -m module words…`; its exit status. `what` is how a sentence calls it, with its verb.

    Raises:
        UserError: this package lies in no checkout.
    """
    if not _CHECKOUT.joinpath(*module.split("."), "__main__.py").is_file():
        raise UserError(
            f"{what} part of a checkout, and {_CHECKOUT} is none: clone the repository, `make install` there, and run "
            "this from it"
        )
    return subprocess.call([sys.executable, "-m", module, *words], cwd=_CHECKOUT)
