"""The cores of this machine: how busy they are, and which of them, with how many threads, this process computes on.

The engines and the trainer of a run on one machine have cores of their own, or take turns with all cores while the run
is live. Their processes begin on all cores and move then: OpenMP counts the cores at its start, and threads that are
more than that wait for each other badly.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from pipelinerl.system.references import load_reference
from pipelinerl.system.secret_variables import read_secret

#: Environment variable in which the launcher names the process's own cores, as in `0,1`.
VARIABLE: Final = "PIPELINERL_CORES"


class ComputeCores:
    """This process's cores and compute threads: its own, with `threads` threads, or those that it shares in turn."""

    def __init__(self, set_threads: str, threads: int) -> None:
        """Change nothing yet; `set_threads` is the reference of a function that sets the calling thread's threads."""
        named = read_secret(VARIABLE) or ""  # all variables of the project are withheld from the environment
        self._own = {int(core) for core in named.split(",") if core}
        self._set_threads, self._threads = set_threads, threads

    def use(self, shared: Sequence[int]) -> None:
        """Compute on the cores `shared`, a thread on each, or on the own ones; to be called on the computing thread."""
        cores = set(shared) or self._own
        for thread in os.listdir("/proc/self/task") if cores else ():
            with suppress(OSError):  # the thread has ended, or a core is gone
                os.sched_setaffinity(int(thread), cores)
        load_reference(self._set_threads)(len(shared) or self._threads)


def usable_cores() -> tuple[int, ...]:
    """Return the cores on which this process may run; empty if the system does not say."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def busy_seconds(cores: Collection[int], root: Path = Path("/proc")) -> float | None:
    """Return the seconds, of all cores together, for which they have been busy since the start; None if unknown."""
    try:
        lines = (root / "stat").read_text().splitlines()
    except OSError:
        return None
    ticks = 0
    for name, *fields in map(str.split, lines):
        if name.startswith("cpu") and name != "cpu" and int(name[3:]) in cores:
            user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")
