"""Measure what the proofs of engines cost a run: processor seconds of a step by role, and its length.

    proven      the run as it is: each engine answers the canary at each version, and the trainer computes the answers
    unproven    the same run without proofs after updates

Each round runs both arms one after the other. Processor seconds are those between two steps of a live run, so starts do
not count. The length of a step depends on the machine's other load.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.measure import Row, bootstrap_median, report
from benchmarks.processes import LiveRun, live_run, waited
from pipelinerl.observability.events import Event, read_events
from pipelinerl.observability.usage import cpu_seconds
from pipelinerl.trainers.torch.trainer import TorchTrainer
from pipelinerl.training.engine_proofs import EngineProofs
from pipelinerl.training.publishing import Publishing

ARMS: Final = {
    "proven": "trainer.type=torch",
    "unproven": "trainer.type=benchmarks.proof_cost:unproven",
}
_ROLES: Final = ("engine-0", "trainer", "actor-0", "controller")
_TARGET: Final = 1.01
_FIRST: Final = 20


def unproven() -> TorchTrainer:
    """Return the torch trainer, in a process that proves engines only when they join."""
    prove = Publishing._prove

    async def joined(self: Publishing, joining: Sequence[str], others: Sequence[str], published: Any) -> None:
        await prove(self, joining, [], published)
        self._owed.clear()

    for owner, name, does in (
        (Publishing, "_prove", joined),
        (EngineProofs, "publish", lambda self, version, gather: None),
        (EngineProofs, "failed_rollouts", lambda self, accumulated, version: {}),
    ):
        setattr(owner, name, does)
    return TorchTrainer()


def run(quick: bool = False, changes: Sequence[str] = ()) -> None:
    """Run both arms in each round, print the table and, unless `quick`, write the record."""
    rounds, steps = (1, 20) if quick else (6, 100)
    measured: dict[str, list[Mapping[str, float]]] = {arm: [] for arm in ARMS}
    for number in range(rounds):
        for arm in sorted(ARMS, reverse=bool(number % 2)):
            measured[arm].append(_measured(ARMS[arm], steps, changes))
            print(arm, measured[arm][-1], flush=True)
    rows = []
    for what in measured["proven"][0]:
        ratio = bootstrap_median([a[what] / b[what] for a, b in zip(*measured.values(), strict=True)])
        goal = what == "all roles"
        seconds = bootstrap_median([each[what] for each in measured["proven"]]).median
        met = ratio.median <= _TARGET if goal else None
        rows.append(Row(f"{what} ({1000 * seconds:.1f} ms a step)", ratio, f"<= {_TARGET}" if goal else "", met))
    title = "proven ÷ unproven: processor seconds of a step by role, and seconds between steps"
    record = {"steps": steps, "changes": list(changes), **measured}
    report("proof_cost", rows, record, quick=quick, title=title)


def _measured(arm: str, steps: int, changes: Sequence[str]) -> Mapping[str, float]:
    """Return the seconds of one step of a run, by what is measured."""
    given = ("tiny", "run.steps=1000000", "evaluation.problems=0", "checkpoint.interval_steps=1000000", arm, *changes)
    with tempfile.TemporaryDirectory(prefix="pipelinerl-proof-cost-") as folder:
        directory = Path(folder) / "tiny"
        with live_run(directory) as live:
            live.start([*given, f"run.directory={folder}"])
            began, before = _at(live, _FIRST)
            ended, after = _at(live, began["step"] + steps)
    count = ended["step"] - began["step"]
    found = {role: (after[role] - before[role]) / count for role in _ROLES}
    return {**found, "all roles": sum(found.values()), "length": (ended["time"] - began["time"]) / count}


def _at(live: LiveRun, step: int) -> tuple[Event, dict[str, float]]:
    """Wait for a step; return the newest step's event, and the processor seconds of each role."""
    path = live.directory / "events.jsonl"

    def newest() -> Event | None:
        events = read_events(path) if path.is_file() else []
        taken = [event for event in events if event["kind"] == "step"]
        return taken[-1] if taken and taken[-1]["step"] >= step else None

    event = waited(newest, f"step {step}", every_s=0.2)
    return event, {role: cpu_seconds(live.waited_for(role).pid) for role in _ROLES}
