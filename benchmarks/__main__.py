"""`python -m benchmarks [NAME… | all]`: list the benchmarks in this folder, or run some of them.

A benchmark is a module here with `run(quick, …)`, which prints a table and, unless quick, writes its record to
results/; `plot()` draws a picture of the record into docs/pictures/. The exit status is 1 if a benchmark raised an
error. Options and overrides of recipe keys (`section.key=value`) are passed to `run`; a benchmark whose `run` lacks
such a parameter is rejected.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import pkgutil
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

_FOLDER: Final = Path(__file__).parent
#: Optional parameters of a benchmark's `run` that the command line can set.
_OPTIONS: Final = ("seeds", "only", "recipe", "steps", "changes")


def names(function: str = "run") -> dict[str, str]:
    """Map each module in this folder that defines `function` to the first line of its docstring."""
    # Parse the files instead of importing them: some need optional packages.
    trees = {
        module.name: ast.parse((_FOLDER / f"{module.name}.py").read_text())
        for module in pkgutil.iter_modules([str(_FOLDER)])
        if module.name != "__main__"
    }
    return {
        name: (ast.get_docstring(tree) or "").partition("\n")[0]
        for name, tree in sorted(trees.items())
        if any(isinstance(node, ast.FunctionDef) and node.name == function for node in tree.body)
    }


def run_benchmarks(
    wanted: Sequence[str], *, quick: bool = False, plot: bool = False, options: Mapping[str, Any] = MappingProxyType({})
) -> int:
    """Run or plot the named benchmarks one after another; return the exit status (2: bad arguments, 1: one failed)."""
    known = list(names("plot" if plot else "run"))
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
            if unknown := options.keys() - inspect.signature(module.run).parameters:
                print(f"{name} does not take {', '.join(sorted(unknown))}; leave that out", file=sys.stderr)
                return 2
            module.plot() if plot else module.run(quick=quick, **options)
        except Exception:  # a failed benchmark must not keep the remaining ones from running
            traceback.print_exc()
            failed.append(name)
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run, plot or list the benchmarks; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="NAME | section.key=value", help="default: list the benchmarks")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: checks that it runs, gives no figure")
    parser.add_argument("--plot", action="store_true", help="draw the picture of the record in docs/, without a run")
    parser.add_argument("--seeds", type=int, nargs="+", help="run these seeds")
    parser.add_argument("--only", nargs="+", metavar="PART", help="run these parts of the benchmark")
    parser.add_argument("--recipe", help="train this recipe instead of the benchmark's own")
    parser.add_argument("--steps", type=int, help="optimizer steps of each run")
    given = parser.parse_args(arguments)
    given.changes = [word for word in given.words if "=" in word]
    chosen = [word for word in given.words if "=" not in word]
    if not chosen:
        width = max(map(len, names()))
        print("\n".join(f"{name:{width}}  {line}" for name, line in names().items()))
        return 0
    options = {name: getattr(given, name) for name in _OPTIONS if getattr(given, name)}
    return run_benchmarks(chosen, quick=given.quick, plot=given.plot, options=options)


if __name__ == "__main__":
    sys.exit(main())
