"""The shipped recipe `rlvr` with three seeds: does the reward of each of its three domains rise?

    python -m benchmarks rlvr                                    three whole runs; benchmarks/results/rlvr.json
    python -m benchmarks.rlvr --seeds 0 --directory DIR          one of them, which is kept with its report

Compared are a domain's rewards in the first and in the last steps, as the run's own events say them: of answers to
training problems, sampled at temperature 1. Each window is told by the median over its steps, with the bootstrap's
interval; a reward rises if the intervals do not touch. Beside them stands the greedy accuracy on held-out problems. A
seed whose result lies in DIR is not run again. Processor time is that of all processes of a run; wall time is this
machine's, and says little where other work goes on.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.measure import Interval, Row, bootstrap_median, print_table, write_record
from pipelinerl.config.recipe import load
from pipelinerl.observability.events import Event, read_events

RECIPE: Final = "rlvr"
SEEDS: Final = (0, 1, 2)
#: Steps at the beginning and at the end that are compared.
WINDOW: Final = 20
#: Twenty minutes on two cores.
CPU_S: Final = 2400.0
_QUICK: Final = ("run.steps=20", "evaluation.problems=24")
_DEADLINE_S: Final = 7200.0


def measured(changes: Sequence[str], *, seed: int, directory: Path) -> dict[str, Any]:
    """Run the recipe once and return its curves and costs.

    Raises:
        RuntimeError: it did not take all its steps; its last words are told.
    """
    wanted = [*changes, f"run.seed={seed}", f"run.directory={directory}", f"run.name=seed-{seed}"]
    config = load(RECIPE, wanted)
    began, cpu_before = time.monotonic(), _cpu_of_children()
    done = subprocess.run(
        [sys.executable, "-m", "pipelinerl.cli", "run", RECIPE, *wanted],
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
    )
    seconds, cpu_s = time.monotonic() - began, _cpu_of_children() - cpu_before
    log = config.run_directory / "events.jsonl"
    events = read_events(log) if log.exists() else []
    steps = [event for event in events if event["kind"] == "step"]
    if len(steps) < config.run.steps:
        said = (done.stdout + done.stderr)[-3000:]
        raise RuntimeError(f"seed {seed} took {len(steps)} of {config.run.steps} steps:\n{said}")
    held_out = [event for event in events if event["kind"] == "evaluation"]
    domains = {domain.name: curves(steps, held_out, domain.name) for domain in config.trained_domains}
    return {"seed": seed, "seconds": round(seconds), "cpu_s": round(cpu_s), "steps": len(steps), "domains": domains}


def curves(steps: Sequence[Event], evaluations: Sequence[Event], domain: str) -> dict[str, Any]:
    """A domain's rewards at the beginning and at the end, the curve between, and its held-out accuracies."""
    rewards = [step["by_domain"][domain]["reward"] for step in steps if "reward" in step["by_domain"].get(domain, {})]
    first, last = bootstrap_median(rewards[:WINDOW]), bootstrap_median(rewards[-WINDOW:])
    return {
        "first": first.as_dict(),
        "last": last.as_dict(),
        "rises": last.low > first.high,
        "held_out": [round(each["by_domain"][domain]["accuracy"], 3) for each in evaluations],
        "rewards": [round(reward, 3) for reward in rewards],
    }


def _cpu_of_children() -> float:
    """Processor seconds of all processes below this one that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rows(runs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The table."""
    told = []
    for each in runs:
        for name, domain in each["domains"].items():
            first, last = Interval(**domain["first"]), Interval(**domain["last"])
            held_out = f"held out {domain['held_out'][0]:.2f} → {domain['held_out'][-1]:.2f}"
            shown = f"{first} → {last}; {held_out}"
            told.append(Row(f"seed {each['seed']}, {name}: reward", shown, "rises", domain["rises"]))
    cpu_s = sum(each["cpu_s"] for each in runs)
    told.append(Row("processor seconds of all runs", cpu_s, f"<= {CPU_S:.0f}", cpu_s <= CPU_S))
    return told


def run(
    quick: bool = False, *, seeds: Sequence[int] = SEEDS, changes: Sequence[str] = (), directory: Path | None = None
) -> list[dict[str, Any]]:
    """Measure each seed, print the table, write the record of a whole measurement."""
    where = directory or Path(tempfile.mkdtemp(prefix="pipelinerl-rlvr-"))
    where.mkdir(parents=True, exist_ok=True)
    wanted = [*(_QUICK if quick else ()), *changes]
    runs = []
    for seed in seeds[:1] if quick else seeds:
        kept = where / f"seed-{seed}.json"
        if not kept.is_file():
            kept.write_text(json.dumps(measured(wanted, seed=seed, directory=where)))
        runs.append(json.loads(kept.read_text()))
        print_table(f"rlvr, seed {seed}: {runs[-1]['steps']} steps in {runs[-1]['seconds']} s", rows(runs[-1:]))
    if not quick and set(seeds) == set(SEEDS):
        print_table("rlvr", rows(runs))
        write_record("rlvr", {"recipe": RECIPE, "changes": list(changes), "window": WINDOW, "runs": runs})
    return runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("changes", nargs="*", help="changes of the recipe, section.key=value")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument(
        "--directory", type=Path, default=None, help="keeps runs and results (default: a temporary one)"
    )
    given = parser.parse_args(arguments)
    run(seeds=given.seeds, changes=given.changes, directory=given.directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
