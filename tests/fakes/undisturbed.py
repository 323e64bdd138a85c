"""`undisturbed`: a lockstep run that ended by itself, which every run that was disturbed must equal bit by bit.

There is one of the shipped model, whose torch computes it, and one of the bigram, which is what a run's processes need.
Each is made once, by whichever of the test processes beside each other asks first; the others wait for it. In lockstep,
with the ratio over recomputed log-probs, a run on a CPU is a function of its seed. (Log-probs of the sampler depend in
their last bit on what else was decoded in the same forward pass, hence `over = old`.)
"""

from __future__ import annotations

import fcntl
import os
from enum import StrEnum
from functools import cache
from pathlib import Path
from tempfile import gettempdir, mkdtemp

from tests.fakes.live_run import LiveRun, launched, light_run, new_run

STEPS = 12
LOCKSTEP = (
    f"run.steps={STEPS}",
    "checkpoint.interval_steps=4",
    "staleness.j=1",
    "staleness.k=1",
    "objective.grad1.over=old",
)


class Kind(StrEnum):
    """Which model a lockstep run trains."""

    TINY = "tiny"
    BIGRAM = "bigram"

    def arguments(self, directory: Path) -> list[str]:
        """Those of a lockstep run in `directory`."""
        if self is Kind.BIGRAM:  # at a walk: who disturbs it must come before its end
            return light_run(directory, *LOCKSTEP, walking=True)
        return new_run(directory, *LOCKSTEP)


@cache
def undisturbed(kind: Kind = Kind.TINY) -> LiveRun:
    """The run, which has ended; nothing of it is alive."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if session is None:
        return _made(kind, Path(mkdtemp(prefix="undisturbed-")))
    folder = Path(gettempdir()) / f"undisturbed-{session}-{kind}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go by closing it, or by the end of whoever makes the run
        where = folder / "directory"
        if not where.exists():
            where.write_text(str(_made(kind, Path(mkdtemp(dir=folder))).directory))
    return LiveRun(None, Path(where.read_text()), folder / "output")


def _made(kind: Kind, folder: Path) -> LiveRun:
    directory = folder / "run"
    with launched(kind.arguments(directory), directory) as run:
        assert run.end() == 0, run.story()
        assert run.is_gone()
    return run
