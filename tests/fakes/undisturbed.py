"""`undisturbed`: a lockstep run that ended normally, which every disturbed run must equal bit by bit.

One run trains the shipped model with torch; another trains the bigram model, for tests of a run's processes. Each is
made by the first test process that needs it; other test processes wait. In lockstep, and with policy ratios to
recomputed log-probs (`over = old`), the results of a run on a CPU depend only on its seed. With ratios
to the sampler's log-probs they would not: the last bits of these depend on the other sequences of a forward pass.
"""

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
    TINY = "tiny"
    BIGRAM = "bigram"

    def arguments(self, directory):
        if self is Kind.BIGRAM:  # slowed down, so that a test can disturb the run before it ends
            return light_run(directory, *LOCKSTEP, walking=True)
        return new_run(directory, *LOCKSTEP)


@cache
def undisturbed(kind=Kind.TINY):
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if session is None:
        return _made(kind, Path(mkdtemp(prefix="undisturbed-")))
    folder = Path(gettempdir()) / f"undisturbed-{session}-{kind}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the lock is released when the file is closed or the process ends
        where = folder / "directory"
        if not where.exists():
            where.write_text(str(_made(kind, Path(mkdtemp(dir=folder))).directory))
    return LiveRun(None, Path(where.read_text()), folder / "output")


def curve(run):
    """Return the metrics of each step; if a step was repeated, those of the last repetition."""
    measures = ("reward", "loss", "grad_norm", "entropy", "tokens", "sampled_tokens")
    return {event["step"]: tuple(event[name] for name in measures) for event in run.events("step")}


def _made(kind, folder):
    directory = folder / "run"
    with launched(kind.arguments(directory), directory) as run:
        assert run.end() == 0, run.story()
        assert run.is_gone()
    return run
