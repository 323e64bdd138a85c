"""Compare the arms (variants of a recipe) of a benchmark: each arm is a full `pipelinerl run` for every seed.

`measured` records each run when it ends and skips runs that are recorded already, so an interrupted benchmark can be
continued. A run that shared the machine with other programs is recorded with their load, and the next call repeats this
run. `table` prints one row for each arm, with the mean and the range over its seeds.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import numpy as np
import psutil

from benchmarks.measure import read_record, write_record
from benchmarks.processes import python
from benchmarks.trl_arm import held_out_accuracy, judge_of
from pipelinerl.config.recipe import RunConfig, load
from pipelinerl.models.checkpoint import load_model
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.observability.events import read_events
from pipelinerl.observability.run_history import RunHistory, Series, tell
from pipelinerl.roles.wiring import checkpoints_of

PICTURES: Final = Path(__file__).parents[1] / "docs" / "pictures"
#: Approximate number of points to which a curve is thinned before it is recorded.
_POINTS: Final = 200
#: A run is repeated if other programs used more than this share of the run's own processor time.
_DISTURBED: Final = 0.3

#: The x values and y values of a recorded curve.
Points = tuple[tuple[float, ...], tuple[float, ...]]
#: The recorded results of one run by name; `arm`, `seed` and `completed` are always present.
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """Recipe and events of a run that has ended; `completed` is True if the run took all of its steps."""

    config: RunConfig
    history: RunHistory
    completed: bool
    accuracy: float | None = None
    """Greedy accuracy of the last checkpoint on held-out problems, in float32; None if it was not evaluated."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run of an arm: a recipe, a seed, and overrides of the recipe's keys."""

    arm: str
    seed: int
    recipe: str
    changes: tuple[str, ...]
    cell: str = ""

    @property
    def key(self) -> dict[str, Any]:
        """The entries that identify this job's run in a benchmark's record."""
        return asdict(self) | {"recipe": Path(self.recipe).name, "changes": list(self.changes)}


def train(job: Job, *, judged: bool = True) -> FinishedRun:
    """Run the job and, if `judged`, evaluate the last checkpoint.

    Raises RuntimeError if the run ended without a checkpoint, a step or an evaluation.
    """
    with tempfile.TemporaryDirectory(prefix="pipelinerl-arm-") as folder:
        changes = [*job.changes, f"run.seed={job.seed}", f"run.directory={folder}", "run.name=arm"]
        failure = None
        try:
            python(["-m", "pipelinerl.cli", "run", job.recipe, *changes])
        except RuntimeError as error:  # the steps before the failure count
            failure = error
        config = load(job.recipe, changes)
        log = config.run_directory / "events.jsonl"
        history = tell(read_events(log) if log.exists() else [])
        checkpoint = checkpoints_of(config, config.run_directory).latest()
        if checkpoint is None or not history.evaluations or not history.steps:
            raise RuntimeError(f"the run of {job.key} left nothing to measure") from failure
        accuracy = None
        if judged:
            with judge_of(config) as judge:
                tokenizer, model = ChatTokenizer.load(checkpoint[0]), load_model(checkpoint[0])
                accuracy = held_out_accuracy(config, judge, tokenizer, model)
    completed = len(history.steps) >= config.run.steps
    return FinishedRun(config=config, history=history, completed=completed, accuracy=accuracy)


def measured(
    benchmark: str,
    jobs: Sequence[Job],
    figures: Callable[[Job, FinishedRun], Figures],
    *,
    quick: bool,
    judged: bool = True,
    repeats: bool = True,
    summary: Callable[[Sequence[Figures]], Mapping[str, Any]] = lambda _: {},
) -> list[Figures]:
    """Return the figures (recorded results) of every job; first run each job that is not in the record yet.

    Recorded runs of other arms, seeds or cells stay in the record.

    Args:
        benchmark: name of the record, which is written after each run unless `quick`.
        figures: computes the figures of a run that has ended.
        judged: whether the last checkpoint of each run is evaluated.
        repeats: whether a run that other programs disturbed is repeated once.
        summary: further entries of the record, computed from all runs in it.
    """
    known = [] if quick else recorded(benchmark)
    places = {(job.arm, job.seed, job.cell) for job in jobs}
    others = [each for each in known if (each["arm"], each["seed"], each["cell"]) not in places]
    rows: list[Figures] = []
    seconds: list[float] = []
    for number, job in enumerate(jobs):
        row = next((each for each in known if job.key.items() <= each.items()), None)
        if row is None or (repeats and row.get("others", 0.0) > _DISTURBED and not row.get("repeated")):
            began, meter = time.monotonic(), _OtherWork()
            ran = job.key | figures(job, train(job, judged=judged)) | meter.figures()
            seconds.append(time.monotonic() - began)
            left = (len(jobs) - number - 1) * median(seconds) / 60
            name = ", ".join(part for part in (f"seed {job.seed}", job.cell, job.arm) if part)
            print(f"{benchmark}: {name}: {seconds[-1]:.0f} s; at most {left:.0f} min left", file=sys.stderr, flush=True)
            row = ran if row is None else min(row, ran, key=lambda each: each["others"]) | {"repeated": True}
        rows.append(row)
        later = [each for each in known if any(job.key.items() <= each.items() for job in jobs[number + 1 :])]
        runs = sorted([*rows, *later, *others], key=lambda each: int(each["seed"]))
        write_record(benchmark, {**summary(runs), "runs": runs}, quick=quick)
    return rows


class _OtherWork:
    def __init__(self) -> None:
        self._busy, self._own = _busy_s(), _own_s()

    def figures(self) -> Figures:
        """Return `load` (one-minute load average) and `others` (other programs' CPU time over the run's)."""
        own = _own_s() - self._own
        return {"load": os.getloadavg()[0], "others": max(0.0, _busy_s() - self._busy - own) / max(own, 1e-3)}


def _own_s() -> float:
    """Return the CPU seconds that this process and its ended child processes have used."""
    return sum(psutil.Process().cpu_times()[:4])


def _busy_s() -> float:
    """Return the CPU seconds, over all cores, that any program used or that the virtual machine's host took away."""
    times = psutil.cpu_times()
    return sum(getattr(times, each, 0.0) for each in ("user", "nice", "system", "irq", "softirq", "steal"))


def recorded(benchmark: str) -> list[Figures]:
    """Return the figures of each run in a benchmark's record; empty if there is no record."""
    return read_record(benchmark).get("runs", [])


def figures_of(job: Job, run: FinishedRun) -> Figures:
    """Return a run's results for the tables and pictures of `schedules` and `staleness`.

    `accuracy`: greedy accuracy of the last weights on held-out problems. `seconds`: training time. `reward`: mean over
    the last tenth of the steps. `area`: mean reward over all steps. `age`: versions from the sampling of a rollout's
    oldest token to the step that trains it, mean over the steps. `discarded`: share of the sampled tokens that were
    dropped as stale. `ess`: effective sample size of π / μ, mean over the steps. `by_samples`, `by_seconds`: curves of
    the reward by the version that sampled it, at the place where that version was made. `ess_by_step`: curve of `ess`.
    Raises ValueError if the steps do not report a figure.
    """
    steps = partial(steps_of, run.history)
    ess, sampled, stale = steps("ess"), steps("sampled_tokens").y, steps("stale_tokens").y[-1]
    clock, reward = training_clock(run.history), run.history.by_sampling_version().smoothed()
    taken = [0.0, *steps("reward").x]

    def when_newest(at_steps: Iterable[float]) -> Series:
        """Place each reward where its version was the newest; `at_steps` has the place of the end of each step."""
        return Series(tuple(np.interp(reward.x, taken, [0.0, *at_steps]).tolist()), reward.y)

    return {
        "completed": run.completed,
        "accuracy": run.accuracy,
        "reward": run.history.last_reward or 0.0,
        "area": fmean(steps("reward").y),
        "seconds": clock[-1],
        "age": fmean(steps("staleness_mean").y),
        "discarded": stale / (stale + sum(sampled)),
        "ess": fmean(ess.y),
        "tokens_per_s": sum(sampled) / clock[-1],
        "by_samples": thinned(when_newest(accumulate(steps("rollouts").y))),
        "by_seconds": thinned(when_newest(clock)),
        "ess_by_step": thinned(ess.smoothed()),
    }


def training_clock(history: RunHistory) -> tuple[float, ...]:
    """Return the time at the end of each step, in seconds since the first step began to wait for rollouts."""
    ended = history.series(history.steps, "elapsed_s", x="step").y
    began = ended[0] - steps_of(history, "step_s").y[0] - steps_of(history, "wait_s").y[0]
    return tuple(at - began for at in ended)


def steps_of(history: RunHistory, field: str) -> Series:
    """Return the values of a metric over the steps. Raises ValueError if the steps do not report this metric."""
    series = history.by_step(field)
    if not series:
        raise ValueError(f"expected the run's steps to report {field}, got {sorted(history.steps[0])}")
    return series


def thinned(series: Series) -> Points:
    """Reduce a curve to about `_POINTS` points and few digits: as much as a picture can show."""
    every = max(1, len(series.x) // _POINTS)
    return tuple(float(f"{x:.6g}") for x in series.x[::every]), tuple(float(f"{y:.4g}") for y in series.y[::every])


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its heading, the key of its values in `Figures`, and their format."""

    heading: str
    key: str
    form: str


def by_arm(runs: Sequence[Figures]) -> Mapping[str, list[Figures]]:
    """Group runs by arm, in the order in which the arms first appear."""
    arms: dict[str, list[Figures]] = {}
    for each in runs:
        arms.setdefault(each["arm"], []).append(each)
    return arms


def table(runs: Sequence[Figures], columns: Sequence[Column]) -> str:
    """Return a Markdown table with a row per arm: mean over the seeds, and in brackets the range unless it is zero."""
    lines = ["| arm | " + " | ".join(column.heading for column in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, arm in by_arm(runs).items():
        cells = [_spread([run[column.key] for run in arm], column.form) for column in columns]
        broken = sum(not run["completed"] for run in arm)
        mark = f" ({broken} of {len(arm)} incomplete)" if broken else ""
        lines.append(f"| {name}{mark} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _spread(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "never"
    mean, low, high = (format(value, form) for value in (fmean(known), min(known), max(known)))
    spread = mean if low == high else f"{mean} [{low}, {high}]"
    return spread if len(known) == len(values) else f"{spread} ({len(known)} of {len(values)})"


def panels(
    path: Path, draw: Callable[[Sequence[Any]], None], *, lines: int = 2, columns: int = 2, width: float = 11.0
) -> Path:
    """Make a picture of `lines` x `columns` panels, let `draw` fill the panels, and save the picture to `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 3.5 * lines), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    draw(axes)
    for each in axes:
        each.grid(color="#e4e7ec", linewidth=0.8)
        each.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor="white", metadata={"Software": None})
    return path
