"""Memory of a whole run: the peak of everything that `pipelinerl run tiny` starts, launcher included; at most 4 GiB.

RSS counts a page that processes share once for each of them; PSS divides it among them, so that the sum over the
processes is what the machine must really have. The target is on the sum of RSS, the greater of the two.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import psutil

from benchmarks.measure import Row, print_table, write_record

_TARGET_GIB = 4.0
_SAMPLE_EVERY_S = 0.5
_DEADLINE_S = 600.0
_GIB = 2.0**30


@final
@dataclass(slots=True)
class Peaks:
    """Greatest sums seen so far, in bytes, and the greatest RSS of each process by name."""

    rss: int = 0
    pss: int = 0
    samples: int = 0
    by_name: dict[str, int] = field(default_factory=dict)

    def take(self, memory: Mapping[str, tuple[int, int]]) -> None:
        """One sample: (RSS, PSS) by process name."""
        self.samples += 1
        self.rss = max(self.rss, sum(rss for rss, _ in memory.values()))
        self.pss = max(self.pss, sum(pss for _, pss in memory.values()))
        for name, (rss, _) in memory.items():
            self.by_name[name] = max(self.by_name.get(name, 0), rss)


def run(quick: bool) -> Peaks:
    """Run the shipped recipe for some steps and sample its process tree."""
    steps = 10 if quick else 60
    with tempfile.TemporaryDirectory(prefix="pipelinerl-memory-") as folder:
        peaks = _measure(Path(folder), steps)
    rows = [
        Row(
            "all processes, RSS",
            f"{peaks.rss / _GIB:.2f} GiB",
            f"<= {_TARGET_GIB:g} GiB",
            peaks.rss <= _TARGET_GIB * _GIB,
        ),
        Row("all processes, PSS", f"{peaks.pss / _GIB:.2f} GiB"),
    ]
    rows += [Row(f"  {name}", f"{rss / 2**20:.0f} MiB") for name, rss in sorted(peaks.by_name.items())]
    print_table(f"peak memory of a run of {steps} steps, {peaks.samples} samples", rows)
    payload: dict[str, Any] = {
        "steps": steps,
        "rss_bytes": peaks.rss,
        "pss_bytes": peaks.pss,
        "target_gib": _TARGET_GIB,
    }
    write_record("memory", {**payload, "rss_bytes_by_process": dict(sorted(peaks.by_name.items()))})
    return peaks


def _measure(folder: Path, steps: int) -> Peaks:
    command = [sys.executable, "-m", "pipelinerl.cli", "run", "tiny", f"run.steps={steps}", f"run.directory={folder}"]
    peaks, deadline = Peaks(), time.monotonic() + _DEADLINE_S
    output = folder / "output"
    with output.open("wb") as out:
        launcher = psutil.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    while launcher.poll() is None:
        if time.monotonic() > deadline:
            launcher.terminate()
            raise TimeoutError(f"the run did not end within {_DEADLINE_S:g} s:\n{output.read_text()[-2000:]}")
        peaks.take(_tree(launcher))
        time.sleep(_SAMPLE_EVERY_S)
    if launcher.returncode != 0:
        raise RuntimeError(f"the run ended with status {launcher.returncode}:\n{output.read_text()[-2000:]}")
    return peaks


def _tree(launcher: psutil.Popen) -> dict[str, tuple[int, int]]:
    memory: dict[str, tuple[int, int]] = {}
    for process in [launcher, *launcher.children(recursive=True)]:
        try:
            used, name = process.memory_full_info(), _name(process)
        except (psutil.Error, IndexError):  # it ended meanwhile
            continue
        rss, pss = memory.get(name, (0, 0))
        memory[name] = (rss + used.rss, pss + used.pss)
    return memory


def _name(process: psutil.Process) -> str:
    """A role's own name, from its command line; the program's otherwise (a sandbox, the stream server)."""
    words = process.cmdline()
    return words[words.index("--name") + 1] if "--name" in words else Path(words[0].split()[0]).name


if __name__ == "__main__":
    run(quick="--quick" in sys.argv)
