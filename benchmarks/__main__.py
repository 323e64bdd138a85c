"""`python -m benchmarks NAME… | all [--quick | --plot]`: find the benchmarks in this folder and run them.

A benchmark is a module here with a function `run(quick: bool)`. It prints its table and writes its record; the status
is 1 when one of them raised. One that also has `plot()` draws its picture in `docs/` from the record, without a run.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

_FOLDER = Path(__file__).parent
_NOT_BENCHMARKS = frozenset({"__main__", "measure"})


def names() -> list[str]:
    """Return the names of the modules in this folder that define `run`, sorted."""
    found = {module.name for module in pkgutil.iter_modules([str(_FOLDER)])} - _NOT_BENCHMARKS
    return sorted(name for name in found if "\ndef run(" in (_FOLDER / f"{name}.py").read_text())


def run_benchmarks(wanted: Sequence[str], *, quick: bool, plot: bool = False) -> int:
    """Run, or plot, the named benchmarks in turn; return the exit status (2: unknown name, 1: one failed)."""
    known = [name for name in names() if not plot or "\ndef plot(" in (_FOLDER / f"{name}.py").read_text()]
    chosen = known if "all" in wanted else list(wanted)
    for name in chosen:
        if name not in known:
            kind = "benchmark with a picture" if plot else "benchmark"
            print(f"no {kind} is called {name!r}; there are: {', '.join(known) or 'none'}", file=sys.stderr)
            return 2
    failed = []
    for name in chosen:
        started = time.monotonic()
        try:
            module = importlib.import_module(f"benchmarks.{name}")
            module.plot() if plot else module.run(quick=quick)
        except Exception:  # one benchmark's failure must not lose the others' figures
            traceback.print_exc()
            failed.append(name)
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"all, or any of: {', '.join(names())}")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: shows that it runs, not a figure")
    parser.add_argument("--plot", action="store_true", help="draw the picture of the record in docs/, without a run")
    given = parser.parse_args(arguments)
    return run_benchmarks(given.names, quick=given.quick, plot=given.plot)


if __name__ == "__main__":
    sys.exit(main())
