"""`Scenario`: a fault drawn from a seed and applied to a real or simulated run, and the promises that must hold.

A scenario is a module in this folder with a function `play(seed, directory) -> Verdict`, the seeds `SHORT` (for
`make test`) and `LONG` (for `make chaos`), and a first line that states the fault and the promise. pytest and
`pipelinerl chaos` both call `play`, so either can replay a seed that failed in the other.
"""

from __future__ import annotations

import ast
import importlib
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_NOT_SCENARIOS = frozenset({"__main__", "scenario"})


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one seed: counts, which are summed over seeds, and a sentence for each broken promise."""

    figures: Mapping[str, int]
    broken: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    play: Callable[[int, Path], Verdict]
    short: Sequence[int]
    long: Sequence[int]


@dataclass(slots=True)
class Tally:
    scenario: Scenario
    seeds: list[int] = field(default_factory=list)
    figures: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self):
        figures = ", ".join(f"{number} {name}" for name, number in self.figures.items())
        spread = f"seed {self.seeds[0]}" if len(self.seeds) == 1 else f"seeds {self.seeds[0]} to {self.seeds[-1]}"
        line = f"{self.scenario.name}: {figures or 'no figures'} ({spread}, {self.seconds:.0f} s)"
        return "\n".join([line, *(f"  BROKEN {sentence}" for sentence in self.broken)])


def names():
    """Return the names of the scenarios: modules in this folder that define `play`."""
    files = {path.stem: path for path in Path(__file__).parent.glob("*.py")}
    return sorted(name for name in files.keys() - _NOT_SCENARIOS if "\ndef play(" in files[name].read_text())


def find(name):
    """Return the scenario of that name; raise `ModuleNotFoundError` if there is none."""
    module = importlib.import_module(f"tests.faults.scenarios.{name}")
    return Scenario(name, module.play, module.SHORT, module.LONG)


def summary(name):
    """Return the first docstring line of the scenario's module, without importing it."""
    text = Path(__file__).with_name(f"{name}.py").read_text()
    return (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]


def play(scenario, seeds, *, report=lambda line: None):
    """Run the seeds in order, each in an empty directory; call `report` with a line of text after each seed."""
    tally = Tally(scenario)
    began = time.monotonic()
    for seed in seeds:
        tally.seeds.append(seed)
        with tempfile.TemporaryDirectory(prefix=f"{scenario.name}-{seed}-", ignore_cleanup_errors=True) as directory:
            try:
                verdict = scenario.play(seed, Path(directory))
            except Exception as error:
                verdict = Verdict({}, ("".join(traceback.format_exception(error)),))
        tally.figures.update(verdict.figures)
        report(f"{scenario.name} seed {seed}: {'BROKEN' if verdict.broken else 'held'}")
        again = f"again with: pipelinerl chaos --scenario {scenario.name} --seed {seed}"
        tally.broken += [f"seed {seed}: {sentence}; {again}" for sentence in verdict.broken]
    tally.seconds = time.monotonic() - began
    return tally


def unbalanced(ledger):
    """Return a sentence if the outcomes of a run's orders do not sum to the number of issued orders."""
    ended = sum(count for outcome, count in ledger.items() if outcome != "issued")
    return [] if ledger["issued"] == ended else [f"the ledger does not balance: {ledger}"]
