"""Compare the time to a held-out accuracy with that of TRL's GRPOTrainer; target 1.0, goal 0.5.

Both arms train the recipe `tiny` with the same inputs and hyper-parameters (`trl_arm` translates them), on the same two
cores, one after the other; their order alternates by seed.

    ours   `pipelinerl run` as a user starts it: launcher, stream server, controller, engine, actor and trainer in
           processes of their own. Times come from its events.jsonl.
    TRL    one process in fp32 (its default, bf16, learns more slowly: docs/understand/mismatch.md). Several thread
           settings are tried for some steps, and the fastest is used.

Our clock starts at the end of the first evaluation, stops at the first evaluation that reaches the target, and includes
later evaluations and checkpoints. TRL's clock starts with its first step and pauses during evaluations; TRL writes no
checkpoints. Both evaluate every `evaluation.interval_steps` steps. An arm that misses the target counts with its whole
time and is marked as such. The time of a step is the median time between the ends of consecutive steps.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any, Final

import tomli_w

from benchmarks.measure import Interval, Row, bootstrap_median, print_table, read_record, write_record
from benchmarks.processes import python
from pipelinerl.config.recipe import load, to_table
from pipelinerl.observability.events import Event, flat_keys, read_events

CORES: Final = 2
#: Thread settings of torch to try for TRL, by name: number of threads, and environment variables.
MANNERS: Final[Mapping[str, tuple[int, dict[str, str]]]] = {
    "2 threads, spinning": (2, {"OMP_NUM_THREADS": "2"}),
    "2 threads, passive": (2, {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}),
    "1 thread": (1, {"OMP_NUM_THREADS": "1"}),
}

#: Points (step, seconds of training so far, held-out accuracy) in the order of steps.
Curve = Sequence[tuple[int, float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The recipe (name or path) of both arms, target accuracies, and limits of our time as a share of TRL's time."""

    recipe: str
    targets: Sequence[float]
    most_time: float
    most_time_per_step: float | None = None
    goal: float
    probe_steps: int = 8  # number of steps for which each thread setting is tried
    probe_tries: int = 2


TINY: Final = Task(recipe="tiny", targets=(0.90, 0.95), most_time=1.0, goal=0.5)


@dataclass(frozen=True, slots=True)
class Crossing:
    """The first evaluation that reached a target; if not `reached`, the last one."""

    step: int
    seconds: float
    reached: bool

    def __str__(self) -> str:
        return f"{self.step} @ {self.seconds:.0f}" + ("" if self.reached else " (not reached)")


@dataclass(frozen=True, slots=True)
class Arm:
    """One training run: its curve, the seconds of training at each step's end, and the machine's load at the start."""

    curve: Curve
    ends: Sequence[float]
    load: float

    def crossing(self, target: float) -> Crossing:
        """Return the first evaluation after step 0 with accuracy at least `target`; if there is none, the last."""
        for step, seconds, accuracy in self.curve:
            if step > 0 and accuracy >= target:
                return Crossing(step, seconds, True)
        step, seconds, _ = self.curve[-1]
        return Crossing(step, seconds, False)

    @property
    def seconds_per_step(self) -> float:
        """The median time between the ends of consecutive steps."""
        return statistics.median(end - before for before, end in pairwise(self.ends))


#: By seed: our training run, and TRL's.
Pairs = Mapping[int, tuple[Arm, Arm]]


def arm_of(events: Sequence[Event], load: float) -> Arm:
    """Return our run, timed from its first evaluation. Raises ValueError if there are fewer than two evaluations."""
    evaluations = [event for event in events if event["kind"] == "evaluation" and event["accuracy"] is not None]
    if len(evaluations) < 2:
        raise ValueError(f"expected an evaluation before training and one after it, got {len(evaluations)} in all")
    began = evaluations[0]["elapsed_s"]
    curve = [(event["model_version"], event["elapsed_s"] - began, event["accuracy"]) for event in evaluations]
    return Arm(curve, [event["elapsed_s"] - began for event in events if event["kind"] == "step"], load)


def ours(recipe: Path, *, seed: int, until: float) -> Arm:
    """Run `pipelinerl run` until its held-out accuracy reaches `until`."""
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="pipelinerl-trl-") as folder:
        chosen = [f"run.seed={seed}", f"run.until_accuracy={until}", f"run.directory={folder}", "run.name=ours"]
        python(["-m", "pipelinerl.cli", "run", str(recipe), *chosen], environment=_environment())
        return arm_of(list(read_events(Path(folder) / "ours" / "events.jsonl")), load_average)


def theirs(recipe: Path, *, seed: int, until: float, manner: str) -> Arm:
    """Run TRL with the thread setting `manner` (see `MANNERS`) until its held-out accuracy reaches `until`."""
    load_average, steps = os.getloadavg()[0], load(recipe).run.steps
    result = _trl(manner, recipe=str(recipe), seed=seed, steps=steps, until=until)
    return Arm(result["points"], result["ends"], load_average)


def fastest_manner(recipe: Path, *, steps: int, tries_of_each: int) -> tuple[str, dict[str, float]]:
    """Try all thread settings for TRL in turn; return the fastest, and the best seconds per step of each setting."""
    tries: dict[str, list[float]] = {name: [] for name in MANNERS}
    for name in islice(cycle([*MANNERS, *list(MANNERS)[::-1]]), tries_of_each * len(MANNERS)):
        result = _trl(name, recipe=str(recipe), seed=0, steps=steps, evaluate=False)
        tries[name].append(result["ends"][-1] / len(result["ends"]))
    seconds = {name: min(values) for name, values in tries.items()}
    return min(seconds, key=seconds.__getitem__), seconds


def _trl(manner: str, **order: Any) -> Any:
    threads, settings = MANNERS[manner]
    words = ["-m", "benchmarks.trl_arm", json.dumps({**order, "threads": threads})]
    return json.loads(python(words, environment=_environment() | settings).splitlines()[-1])


def _environment() -> dict[str, str]:
    """Return this process's environment without the variables that set OpenMP's threads."""
    return {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}


def compared(pairs: Sequence[tuple[Arm, Arm]], target: float) -> tuple[Interval, bool]:
    """Return our time to the accuracy `target` over TRL's, paired by seed, and whether all of our runs reached it."""
    crossings = [(mine.crossing(target), other.crossing(target)) for mine, other in pairs]
    ratio = bootstrap_median([mine.seconds / other.seconds for mine, other in crossings])
    return ratio, all(mine.reached for mine, _ in crossings)


def measure(task: Task, recipe: Path, *, seeds: Sequence[int], known: Pairs) -> Iterator[dict[str, Any]]:
    """Train both arms with each seed, half an hour per seed; after each, yield the record, which includes `known`."""
    manner, tried = fastest_manner(recipe, steps=task.probe_steps, tries_of_each=task.probe_tries)
    until, by_seed = max(task.targets), dict(known)
    for seed in seeds:
        arms = {
            "ours": lambda seed=seed: ours(recipe, seed=seed, until=until),
            "TRL": lambda seed=seed: theirs(recipe, seed=seed, until=until, manner=manner),
        }
        done = {name: arms[name]() for name in (list(arms) if seed % 2 == 0 else list(arms)[::-1])}
        by_seed[seed] = (done["ours"], done["TRL"])
        for name, arm in done.items():
            crossings = ", ".join(f"{target:g}: {arm.crossing(target)}" for target in task.targets)
            print(f"trl: seed {seed}, {name}: {crossings}; load {arm.load:.1f}", file=sys.stderr, flush=True)
        yield _payload(task, dict(sorted(by_seed.items())), manner, tried)


def _payload(task: Task, by_seed: Pairs, manner: str, tried: Mapping[str, float]) -> dict[str, Any]:
    """Print the table of the seeds so far, and return the record's payload."""
    pairs = list(by_seed.values())
    ratios = {target: compared(pairs, target) for target in task.targets}
    per_step = bootstrap_median([mine.seconds_per_step / other.seconds_per_step for mine, other in pairs])
    print_table(f"trl: {task.recipe} to a held-out accuracy; TRL with {manner}", _rows(task, pairs, ratios, per_step))
    return {
        "targets": {
            f"{target:g}": {**ratio.as_dict(), "ours_arrived": all_} for target, (ratio, all_) in ratios.items()
        },
        "seconds_per_step": per_step.as_dict(),
        "manner": {"chosen": manner, "seconds_per_step": tried},
        "seeds": list(by_seed),
        "ours": [asdict(mine) for mine, _ in pairs],
        "trl": [asdict(other) for _, other in pairs],
    }


def _rows(
    task: Task, pairs: Sequence[tuple[Arm, Arm]], ratios: Mapping[float, tuple[Interval, bool]], per_step: Interval
) -> list[Row]:
    rows = []
    for target, (ratio, arrived) in ratios.items():
        met = arrived and ratio.median <= task.most_time
        rows.append(Row(f"time to {target:g}, ours / TRL", ratio, f"<= {task.most_time:g} (goal {task.goal:g})", met))
        for name, side in zip(("ours", "TRL"), zip(*pairs, strict=True), strict=True):
            rows.append(Row(f"    {name}: step @ seconds", ", ".join(str(arm.crossing(target)) for arm in side)))
    most = task.most_time_per_step
    limit = () if most is None else (f"<= {most:g}", per_step.median <= most)
    rows.append(Row("seconds per step, ours / TRL", per_step, *limit))
    before = " ".join(f"{a.curve[0][2]:.3f}/{b.curve[0][2]:.3f}" for a, b in pairs)
    return [*rows, Row("accuracy before training, ours / TRL", before)]


def run(quick: bool = False, *, seeds: Sequence[int] = (), changes: Sequence[str] = ()) -> None:
    """Run the benchmark, print its table and write its record.

    With `seeds`, recorded results of other seeds are kept. With `changes` (overrides of the recipe's keys), nothing is
    recorded.
    """
    known = recorded("trl", TINY.recipe) if seeds and not changes else {}
    for payload in on_two_cores(TINY, seeds or range(1 if quick or changes else 3), overrides=changes, known=known):
        write_record("trl", payload, quick=quick or bool(changes))


def recorded(benchmark: str, recipe: str, overrides: Sequence[str] = ()) -> Pairs:
    """Return the benchmark's recorded pairs of runs by seed; none without a record.

    Raises ValueError, which names the keys, if the record is of another recipe.
    """
    table = read_record(benchmark)
    if not table:
        return {}
    if changed := changed_keys(table["recipe"], recipe, overrides):
        raise ValueError(
            f"{benchmark}.json is of another recipe than {recipe} is now ({', '.join(changed)} differ); measure all "
            f"seeds again: python -m benchmarks {benchmark}"
        )
    pairs = [(Arm(**mine), Arm(**other)) for mine, other in zip(table["ours"], table["trl"], strict=True)]
    return dict(zip(table.get("seeds", range(len(pairs))), pairs, strict=True))


#: Keys that change neither what a run learns nor how long it takes.
_WITHOUT_EFFECT: Final = ("launch.", "run.engine_timeout_s", "run.no_signal_steps", "run.stall_s")


def changed_keys(recorded: Mapping[str, Any], recipe: str, overrides: Sequence[str] = ()) -> list[str]:
    """Return the keys in which a recorded recipe differs from the recipe as it is now.

    A key that the record lacks counts only if the recipe sets it: its default is what the code did before the key came.
    On CPUs, `auto` is float32.
    """
    config = load(recipe, overrides)
    before, now = dict(flat_keys(recorded)), dict(flat_keys(_portable(to_table(config))))
    made = dict(flat_keys(_portable(to_table(config, without_defaults=True))))
    return [
        key
        for key in sorted(now.keys() & (before.keys() | made.keys()))
        if before.get(key) != now[key]
        and not key.startswith(_WITHOUT_EFFECT)
        and not (now[key] == "auto" and before.get(key) in ("float32", "fp32"))
    ]


def on_two_cores(
    task: Task, seeds: Sequence[int], *, overrides: Sequence[str], known: Pairs
) -> Iterator[dict[str, Any]]:
    """Measure on two cores; yield the record after each seed. Raises RuntimeError if TRL is missing or an arm fails."""
    if importlib.util.find_spec("trl") is None:
        raise RuntimeError("TRL is not installed; `make bench NAME=trl` installs it into the environment and runs this")
    table = to_table(load(task.recipe, overrides))
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:CORES])  # child processes inherit these cores
    try:
        with tempfile.TemporaryDirectory() as folder:
            recipe = Path(folder) / "recipe.toml"  # a copy, since the shipped recipe may change meanwhile
            recipe.write_text(tomli_w.dumps(table))
            for payload in measure(task, recipe, seeds=seeds, known=known):
                yield {"recipe": _portable(table), **payload}
    finally:
        os.sched_setaffinity(0, allowed)


def _portable(table: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(table).replace(f"{Path(__file__).parents[1]}/", ""))
