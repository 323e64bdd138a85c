"""A whole `pipelinerl run` as an arm of a benchmark: what its events tell, and what its last weights can do."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from benchmarks.trl_arm import HeldOut, Judge
from pipelinerl.config.recipe import load
from pipelinerl.models.checkpoint import load_model
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.observability.events import read_events
from pipelinerl.observability.run_history import RunHistory, Series, tell
from pipelinerl.roles.wiring import checkpoints_of

_DEADLINE_S: Final = 3600.0
#: Of a curve in a record.
_POINTS: Final = 200

#: x and y of a curve, as a record carries them.
Points = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """`accuracy` is greedy and held out, of the last checkpoint in float32; `completed`: all of the recipe's steps."""

    history: RunHistory
    accuracy: float
    completed: bool


def training_clock(history: RunHistory) -> tuple[float, ...]:
    """Seconds of training at the end of each step, from when the first began to wait for its rollouts.

    Raises:
        ValueError: the steps do not report their times.
    """
    ended = history.series(history.steps, "elapsed_s", x="step").y
    began = ended[0] - steps_of(history, "step_s").y[0] - steps_of(history, "wait_s").y[0]
    return tuple(at - began for at in ended)


def discarded_share(history: RunHistory) -> float:
    """Of all sampled tokens, those of stale groups. Raises ValueError where the steps do not report them."""
    stale = steps_of(history, "stale_tokens").y[-1]
    return stale / (stale + sum(steps_of(history, "sampled_tokens").y))


def train(recipe: str, changes: Sequence[str], *, seed: int) -> FinishedRun:
    """Run `recipe` with `changes` in processes of its own; a run that broke down is told by its last checkpoint.

    Raises:
        RuntimeError: it ended before it had an evaluation and a checkpoint.
    """
    with _somewhere(seed) as where:
        wanted = [*changes, *where]
        done = subprocess.run(
            [sys.executable, "-m", "pipelinerl.cli", "run", recipe, *wanted],
            text=True,
            capture_output=True,
            timeout=_DEADLINE_S,
        )
        config = load(recipe, wanted)
        log = config.run_directory / "events.jsonl"
        history = tell(read_events(log) if log.exists() else [])
        checkpoint = checkpoints_of(config, config.run_directory).latest()
        if checkpoint is None or not history.evaluations or not history.steps:
            said = (done.stdout + done.stderr)[-3000:]
            arm = " ".join([recipe, *changes, f"run.seed={seed}"])
            raise RuntimeError(f"{arm} ended with {done.returncode} and nothing to measure:\n{said}")
        model = load_model(checkpoint[0])
        with Judge(config) as judge:
            accuracy = HeldOut(config, judge, ChatTokenizer.load(checkpoint[0])).accuracy(model)
    return FinishedRun(history=history, accuracy=accuracy, completed=len(history.steps) >= config.run.steps)


@contextmanager
def _somewhere(seed: int) -> Iterator[list[str]]:
    with tempfile.TemporaryDirectory(prefix="pipelinerl-arm-") as folder:
        yield [f"run.seed={seed}", f"run.directory={folder}", "run.name=arm"]


def steps_of(history: RunHistory, field: str) -> Series:
    """A figure over the steps.

    Raises:
        ValueError: the steps do not report it.
    """
    series = history.by_step(field)
    if not series:
        raise ValueError(f"expected the run's steps to report {field}, got {sorted(history.steps[0])}")
    return series


def thinned(series: Series) -> Points:
    """As many points as a figure shows, in as many digits."""
    every = max(1, len(series.x) // _POINTS)
    return tuple(float(f"{x:.6g}") for x in series.x[::every]), tuple(float(f"{y:.4g}") for y in series.y[::every])
