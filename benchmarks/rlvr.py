"""The shipped recipe `rlvr` with three seeds: does the reward of each of its three domains rise?

    python -m benchmarks rlvr                     three whole runs; the record is benchmarks/results/rlvr.json
    python -m benchmarks.rlvr --seeds 0 run.steps=60

Told are, for each seed and domain, the mean reward of the first and of the last tenth of the steps, as the run's
own events say them (they are of training problems, sampled at the run's temperature), and the curve between. The run of
each seed stays in `--directory`, with its report.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks.measure import write_record
from pipelinerl.config.recipe import load
from pipelinerl.observability.events import read_events

RECIPE: Final = "rlvr"
_SEEDS: Final = (0, 1, 2)
_QUICK: Final = ("run.steps=20", "evaluation.problems=24")
_DEADLINE_S: Final = 3600.0
_POINTS: Final = 60


def measured(changes: Sequence[str], *, seed: int, directory: Path) -> dict[str, Any]:
    """Run the recipe once and return each domain's curve.

    Raises:
        RuntimeError: it took no steps; its last words are told.
    """
    changes = [*changes, f"run.seed={seed}", f"run.directory={directory}", f"run.name=rlvr-{seed}"]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pipelinerl.cli", "run", RECIPE, *changes],
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
    )
    seconds, config = time.monotonic() - began, load(RECIPE, changes)
    log = config.run_directory / "events.jsonl"
    steps = [event for event in (read_events(log) if log.exists() else []) if event["kind"] == "step"]
    if not steps:
        raise RuntimeError(f"seed {seed} took no step:\n{(done.stdout + done.stderr)[-3000:]}")
    domains = {domain.name: _curve(steps, domain.name) for domain in config.domains}
    return {"seed": seed, "seconds": round(seconds, 1), "steps": len(steps), "domains": domains}


def _curve(steps: Sequence[Any], domain: str) -> dict[str, Any]:
    rewards = [each["by_domain"][domain]["reward"] for each in steps if domain in each.get("by_domain", {})]
    tenth = max(1, len(rewards) // 10)
    every = max(1, len(rewards) // _POINTS)
    return {
        "start": round(fmean(rewards[:tenth]), 4),
        "end": round(fmean(rewards[-tenth:]), 4),
        "curve": [round(fmean(rewards[at : at + every]), 4) for at in range(0, len(rewards), every)],
    }


def run(
    quick: bool = False, *, seeds: Sequence[int] = _SEEDS, changes: Sequence[str] = (), directory: str = ""
) -> None:
    """Measure every seed, print the table, write the record."""
    where = Path(directory or tempfile.mkdtemp(prefix="pipelinerl-rlvr-"))
    wanted = [*(_QUICK if quick else ()), *changes]
    runs = []
    print(f"{'seed':>4} {'domain':<14} {'start':>7} {'end':>7} {'rise':>7}   seconds", flush=True)
    for seed in seeds:
        runs.append(measured(wanted, seed=seed, directory=where))
        for name, told in runs[-1]["domains"].items():
            rise = told["end"] - told["start"]
            print(
                f"{seed:>4} {name:<14} {told['start']:>7.3f} {told['end']:>7.3f} {rise:>+7.3f}   "
                f"{runs[-1]['seconds']:.0f}",
                flush=True,
            )
    if not quick:
        write_record("rlvr", {"recipe": RECIPE, "changes": list(changes), "runs": runs})


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("changes", nargs="*", help="changes of the recipe, section.key=value")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(_SEEDS))
    parser.add_argument("--directory", default="", help="where the runs go (default: a temporary directory)")
    given = parser.parse_args(arguments)
    run(seeds=given.seeds, changes=given.changes, directory=given.directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
