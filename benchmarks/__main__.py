"""`python -m benchmarks NAME… | all [--quick]`: finds the benchmarks beside this file and runs them.

A benchmark is a module here with a function `run(quick: bool)`. It prints its table, writes its record and returns
whatever it likes; the exit status is 1 when one of them raised.
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

_NOT_BENCHMARKS = frozenset({"__main__", "measure"})


def names() -> list[str]:
    """Benchmarks that exist, sorted: the modules beside this file that define `run`."""
    folder = Path(__file__).parent
    found = {module.name for module in pkgutil.iter_modules([str(folder)])} - _NOT_BENCHMARKS
    return sorted(name for name in found if "\ndef run(" in (folder / f"{name}.py").read_text())


def run_benchmarks(wanted: Sequence[str], *, quick: bool) -> int:
    """Run the named benchmarks one after the other; returns the exit status (2: unknown name, 1: one failed)."""
    known = names()
    chosen = known if "all" in wanted else list(wanted)
    for name in chosen:
        if name not in known:
            print(f"no benchmark is called {name!r}; there are: {', '.join(known) or 'none'}", file=sys.stderr)
            return 2
    failed = []
    for name in chosen:
        started = time.monotonic()
        try:
            importlib.import_module(f"benchmarks.{name}").run(quick=quick)
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
    given = parser.parse_args(arguments)
    return run_benchmarks(given.names, quick=given.quick)


if __name__ == "__main__":
    sys.exit(main())
