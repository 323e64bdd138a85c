"""The harness of all benchmarks: measuring, recording and printing.

A shared machine's speed varies, so trust only ratios between arms (the variants that a benchmark compares): all arms
run in each round, in alternating order. The result is the median over the rounds of the *paired* ratio, with a 95 %
interval from a bootstrap over the rounds.

    timings = paired({"ours": seconds_of(ours), "theirs": seconds_of(theirs)}, rounds=15)
    faster = timings.ratio("theirs", "ours")          # Interval(median, low, high)
    rows = [Row("speed-up", faster, ">= 2", faster.low >= 2)]
    report("decode", rows, {"speed_up": faster.as_dict(), **timings.as_dict()}, quick=quick)
"""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from pipelinerl.rng import generator

RESULTS = Path(__file__).parent / "results"

_LIBRARIES = ("torch", "transformers", "numpy", "redis", "trl", "vllm", "jax")


@dataclass(frozen=True, slots=True)
class Interval:
    """A median with its 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.4g} [{self.low:.4g}, {self.high:.4g}]"

    def as_dict(self) -> dict[str, float]:
        """Return the interval as a dictionary, to be written to a record."""
        return {"median": self.median, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True)
class Paired:
    """Measurements of each arm by round, `samples[arm][round]`, in the unit that the arm returns."""

    samples: Mapping[str, tuple[float, ...]]

    def median(self, arm: str) -> float:
        """Return the median of one arm."""
        return float(np.median(self.samples[arm]))

    def ratio(self, numerator: str, denominator: str) -> Interval:
        """Return the median over the rounds of numerator / denominator."""
        return bootstrap_median(np.divide(self.samples[numerator], self.samples[denominator]))

    def as_dict(self) -> dict[str, Any]:
        """Return medians and all samples as a dictionary, to be written to a record."""
        return {
            "medians": {arm: self.median(arm) for arm in self.samples},
            "samples": {arm: list(values) for arm, values in self.samples.items()},
        }


def paired(arms: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 1) -> Paired:
    """Run every arm once per round, in order in even rounds and in reverse order in odd rounds.

    `arms` maps names to functions that do the work once and return a measurement (seconds, tokens/s, …). The first
    `warmup` rounds are discarded. Raises ValueError without arms or rounds, or if a measurement is not positive.
    """
    if not arms or rounds < 1:
        raise ValueError(f"expected at least one arm and one round, got {len(arms)} arms and {rounds} rounds")
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(-warmup, rounds):
        order = list(arms) if number % 2 == 0 else list(arms)[::-1]
        for name in order:
            gc.collect()
            value = float(arms[name]())
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"arm {name!r} must measure a finite positive number, got {value}")
            if number >= 0:
                samples[name].append(value)
    return Paired({name: tuple(values) for name, values in samples.items()})


def seconds_of(
    work: Callable[[], object], *, repeats: int = 1, clock: Callable[[], float] = time.perf_counter
) -> Callable[[], float]:
    """Return a function, to be used as an arm, that runs `work` `repeats` times and returns the total seconds."""

    def arm() -> float:
        start = clock()
        for _ in range(repeats):
            work()
        return clock() - start

    return arm


def bootstrap_median(values: Sequence[float] | NDArray[np.float64], *, draws: int = 4000) -> Interval:
    """Return the median with the 95 % percentile interval of the bootstrap (Efron 1979); the draws are seeded."""
    data = np.asarray(values, dtype=np.float64)
    picks = generator(0, "bootstrap", len(data)).integers(0, len(data), size=(draws, len(data)))
    low, high = np.quantile(np.median(data[picks], axis=1), [0.025, 0.975])
    return Interval(float(np.median(data)), float(low), float(high))


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a benchmark's table; `met` says whether the target is met, and is None if the row has no target."""

    name: str
    value: object
    target: str = ""
    met: bool | None = None


def report(name: str, rows: Sequence[Row], record: Mapping[str, Any], *, quick: bool, title: str = "") -> None:
    """Print the rows under `title` (default: the benchmark's name) and, unless `quick`, write the record."""
    print_table(title or name, rows)
    write_record(name, record, quick=quick)


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Print the rows and mark targets as met or missed."""
    mark = {True: "met", False: "MISSED", None: ""}
    cells = [("measure", "value", "target", "")]
    shown = (f"{row.value:.4g}" if isinstance(row.value, float) else str(row.value) for row in rows)
    cells += [(row.name, value, row.target, mark[row.met]) for row, value in zip(rows, shown, strict=True)]
    widths = [max(len(cell[column]) for cell in cells) for column in range(4)]
    print(f"\n{title}")
    for number, cell in enumerate(cells):
        print("  " + "  ".join(text.ljust(width) for text, width in zip(cell, widths, strict=True)).rstrip())
        if number == 0:
            print("  " + "  ".join("-" * width for width in widths[:3]))


def write_record(name: str, payload: Mapping[str, Any], *, quick: bool = False, folder: Path = RESULTS) -> None:
    """Write `payload` and facts of this machine to `<folder>/<name>.json`, unless `quick`. Raises ValueError on NaN."""
    if quick:
        return
    folder.mkdir(parents=True, exist_ok=True)
    record = {"benchmark": name, "machine": machine_facts(), **payload}
    (folder / f"{name}.json").write_text(_laid_out(record) + "\n")


def read_record(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """Return the record of benchmark `name`; empty if there is none."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def recorded_parts(name: str, parts: Sequence[str], folder: Path = RESULTS) -> dict[str, Any]:
    """Return the results of `parts` from the record of benchmark `name`, without parts that were never recorded."""
    return {part: result for part, result in read_record(name, folder).items() if part in parts}


def _laid_out(value: Any, margin: str = "") -> str:
    """Format a value as JSON that people and diffs can read: a container of scalars takes one line."""
    nested = isinstance(value, Mapping | list | tuple) and any(
        isinstance(part, Mapping | list | tuple) for part in (value.values() if isinstance(value, Mapping) else value)
    )
    if not nested:
        return json.dumps(value, allow_nan=False)
    inner = margin + "  "
    if isinstance(value, Mapping):
        parts = [f"{json.dumps(str(key))}: {_laid_out(part, inner)}" for key, part in value.items()]
        return "{\n" + ",\n".join(inner + part for part in parts) + f"\n{margin}}}"
    return "[\n" + ",\n".join(inner + _laid_out(part, inner) for part in value) + f"\n{margin}]"


def machine_facts() -> dict[str, Any]:
    """Return facts that a reader needs to judge a measurement: date, Python, libraries, processor, cores, memory."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": sys.version.split()[0],
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "libraries": {each.name: each.version for each in metadata.distributions() if each.name in _LIBRARIES},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
