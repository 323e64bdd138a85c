"""Launcher, roles and Redis are killed together: losses, weights and prompts equal those of an undisturbed run.

Lockstep runs (j = k = 1, ratio over recomputed log-probs) on the CPU are determined by their seed. `pipelinerl run` is
killed at a random length of its event log, then resumed. Metrics and trained prompts of every step, and the files of
the last checkpoint, must equal those of the undisturbed run bit by bit.
"""

from __future__ import annotations

import hashlib
import os
import signal
from dataclasses import dataclass
from typing import Any

from pipelinerl.rng import generator
from tests.fakes.live_run import launched, new_run, resumed
from tests.fakes.undisturbed import LOCKSTEP, STEPS, undisturbed
from tests.faults.scenarios.scenario import Verdict

SHORT = range(1)
LONG = range(20)

FIGURES = ("loss", "grad_norm", "reward", "entropy", "tokens", "sampled_tokens", "orders")
#: Checkpoint files that may differ after an interruption: the manifest has stream offsets, and the copied event log has
#: more lines.
NOT_COMPARED = ("manifest.json", "run/")


@dataclass(frozen=True, slots=True)
class Learned:
    """The results of a run that must not depend on a kill."""

    steps: dict[int, tuple[Any, ...]]
    files: dict[str, str]
    ledger: dict[str, int]

    @classmethod
    def by(cls, run):
        newest = run.directory / "checkpoints" / f"step-{STEPS:06d}"
        found = {str(path.relative_to(newest)): path for path in newest.rglob("*") if path.is_file()}
        return cls(
            # if a step was repeated, the later event counts
            steps={event["step"]: tuple(event[name] for name in FIGURES) for event in run.events("step")},
            files={
                name: hashlib.blake2b(path.read_bytes()).hexdigest()
                for name, path in sorted(found.items())
                if not name.startswith(NOT_COMPARED)
            },
            ledger=run.events("run_finished")[-1]["ledger"],
        )


def play(seed, directory):
    expected = Learned.by(undisturbed())
    at = int(generator(seed, "whole system").integers(1, len(undisturbed().events())))
    path = directory / "run"
    with launched(new_run(path, *LOCKSTEP), path) as run:
        run.until(lambda run: len(run.events()) >= at, f"line {at} of the event log", timeout_s=200)
        processes = [run.launcher.pid, *run.note_processes()]
        for pid in processes:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # this process ended together with the launcher
        run.launcher.wait()
        killed = len(processes)
    with launched(resumed(path), path) as run:
        ended = run.end(300)
    figures = {"systems killed": 1, "processes": killed}
    if ended:
        return Verdict(figures | {"bit-identical": 0}, (f"the resumed run ended with {ended}:\n{run.story()}",))
    broken = differences(expected, Learned.by(run))
    return Verdict(figures | {"bit-identical": int(not broken)}, tuple(broken))


def differences(expected, found):
    """Return a sentence for each value in which `found` differs from `expected`, the undisturbed run."""
    complaints = [
        f"step {step}: {dict(zip(FIGURES, found.steps.get(step, ()), strict=False))} instead of {figures}"
        for step, figures in expected.steps.items()
        if found.steps.get(step) != figures
    ]
    complaints += [f"{name} differs" for name, digest in expected.files.items() if found.files.get(name) != digest]
    for name in ("trained", "filtered", "stale", "failed"):
        if found.ledger[name] != expected.ledger[name]:
            complaints.append(f"{found.ledger[name]} orders {name} instead of {expected.ledger[name]}")
    return complaints
