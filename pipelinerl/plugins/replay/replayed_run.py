"""`pipelinerl replay`: repeat a step of a run from its checkpoint and streams, and compare the results.

A step is a function of recorded data (weights, groups, learning rates, objective), and trainers on a CPU are
deterministic. A replayed step must therefore reproduce the recorded metrics to the last bit. Rollouts are stored from
the oldest kept checkpoint on, so earlier steps cannot be replayed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from pipelinerl.config.recipe import RunConfig, check_layout, load_run
from pipelinerl.errors import CheckpointError, DivergedError, RecordError, UserError
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.presets import resolve
from pipelinerl.plugins.replay.recorded_run import (
    RecordedStep,
    recorded_groups,
    recorded_step,
    recorded_steps,
    trained_groups,
)
from pipelinerl.roles.trainer_role import loop_settings
from pipelinerl.roles.wiring import checkpoints_of, objective_of
from pipelinerl.roles.workers import close_workers, started
from pipelinerl.training.batch import NonFiniteStep, build
from pipelinerl.training.checkpoints import checkpoint
from pipelinerl.training.checkpoints.manifest import TrainingState
from pipelinerl.training.schedule import AdaptiveObjective
from pipelinerl.training.step import Step
from pipelinerl.types import RolloutGroup

log = logging.getLogger("pipelinerl")

#: Inputs of an objective that other models than the policy compute: a reference or a critic.
_OTHER_WEIGHTS: Final = frozenset({"ref_logprobs", "values"})
#: Metrics that are shown, but not compared with the record.
_MORE: Final = ("kl_k3", "ess", "clip_fraction", "truncated_fraction")


#: Metrics that a replay must reproduce. Together they depend on every weight, token and log-prob of a step.
COMPARED: Final = ("loss", "grad_norm", "reward", "tokens", "entropy", "ratio_max", "optimizer_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """A replayed step: the recorded step, and the metrics of the replay."""

    recorded: RecordedStep
    figures: Mapping[str, float]

    @property
    def differences(self) -> dict[str, tuple[float, float]]:
        """The values (recorded, replayed) of each compared metric that differs in any bit."""
        pairs = {
            name: (self.recorded.figures[name], self.figures.get(name, float("nan")))
            for name in COMPARED
            if name in self.recorded.figures
        }
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A replay and its settings; `groups` maps a group's index to its recorded copies, in order of arrival."""

    step: Step
    objective: AdaptiveObjective
    groups: Mapping[int, Sequence[RolloutGroup]]
    began_at: int = 0
    """The trainer's version before the first step."""
    acceptance: float = math.inf
    """The greatest staleness among the steps; it decides how many versions' weights are kept for `old_logprobs`."""

    def run(self, steps: Sequence[RecordedStep]) -> Iterator[ReplayedStep]:
        """Repeat recorded steps, which must be consecutive; the first one makes version `began_at` + 1.

        Raises RecordError if a step or one of its groups is missing, DivergedError if a step is not finite.
        """
        held = self.began_at
        for recorded in steps:
            if recorded.version != held + 1:
                raise RecordError(f"the step after version {held} is not recorded, the next is {recorded.version}")
            held = recorded.version
            figures = self._take(recorded, self.objective.current)
            yield ReplayedStep(recorded=recorded, figures=figures | self.objective.observe(figures))

    def instead(self, recorded: RecordedStep, objective: PolicyObjective) -> ReplayedStep:
        return ReplayedStep(recorded=recorded, figures=self._take(recorded, objective))

    def _take(self, recorded: RecordedStep, objective: PolicyObjective) -> dict[str, float]:
        self.step.will_sample(recorded.version - 1, acceptance=self.acceptance)
        batch = build(
            trained_groups(recorded, self.groups),
            self.step.rules,
            objective=objective,
            producing=recorded.version,
            baselines=self.objective.baselines,
        )
        try:
            figures = self.step.apply(self.step.accumulate(batch), learning_rates=recorded.learning_rates).figures
        except NonFiniteStep as error:
            raise DivergedError(f"step {recorded.version}: {error} is not finite") from error
        self.objective.trained(batch.scored)
        return figures


def show(run_dir: Path, *, step: int, objective: str | None, console: Console) -> bool:
    """Replay a step and print its metrics next to the recorded ones; return True if both are bit-identical. `objective`
    names a preset to use instead of the run's. Raises UserError.
    """
    check_layout(run_dir)
    config = load_run(run_dir).in_one_process
    other = None if objective is None else resolve(objective, max_tokens=config.sampling.max_tokens)
    if other is not None and (lacking := sorted((other.passes - objective_of(config).passes) & _OTHER_WEIGHTS)):
        raise UserError(f"{objective} needs {' and '.join(lacking)}, for which this run has no weights; choose another")
    steps = recorded_steps(run_dir)
    recorded_step(run_dir, step)
    place, state = _checkpoint_before(config, run_dir, step)
    groups = recorded_groups(config, run_dir)
    chosen = objective_of(config)
    workers = started(config, chosen, checkpoint=place, version=state.model_version)
    settings = loop_settings(config)
    adaptive = AdaptiveObjective(
        chosen, controller=settings.kl, restored=state.kl_coefficient, baselines=state.baselines
    )
    replay = Replay(
        step=workers,
        objective=adaptive,
        groups=groups,
        began_at=state.model_version,
        acceptance=max(each.figures.get("staleness_max", math.inf) for each in steps.values()),
    )
    first = state.model_version + 1
    try:
        before = range(first, step if objective else step + 1)
        replayed = []
        for each in replay.run([_step(steps, version) for version in before]):
            replayed.append(each)
            differing = "; ".join(f"{name} was {was!r}, is {now!r}" for name, (was, now) in each.differences.items())
            console.print(f"step {each.recorded.version}: {differing or 'bit-identical'}", highlight=False)
        if other is not None:
            console.print(_table(replay.instead(steps[step], other), str(objective)))
    except RecordError as error:
        raise UserError(str(error)) from None
    finally:
        close_workers(workers)
    same = not any(each.differences for each in replayed)
    if not objective:
        console.print(_table(replayed[-1], "replayed"))
    return same


def _step(steps: Mapping[int, RecordedStep], version: int) -> RecordedStep:
    if version not in steps or not steps[version].orders:
        raise RecordError(
            f"step {version} is recorded without its groups: the log is from an older version, or truncated"
        )
    return steps[version]


def _checkpoint_before(config: RunConfig, run_dir: Path, step: int) -> tuple[Path | None, TrainingState]:
    for path in reversed(checkpoints_of(config, run_dir).all()):
        try:
            state = checkpoint.load(path)
        except CheckpointError as error:
            log.error("skipping a damaged checkpoint: %s", error)
            continue
        if state.model_version < step:
            return path, state
    return None, TrainingState(model_version=0, epoch=0, offsets={}, ledger={}, controller={})


def _table(replayed: ReplayedStep, heading: str) -> Table:
    table = Table("figure", "recorded", heading, title=f"step {replayed.recorded.version}")
    for name in (*COMPARED, *_MORE):
        values = (replayed.recorded.figures.get(name), replayed.figures.get(name))
        table.add_row(name, *("" if value is None else f"{value:.9g}" for value in values))
    return table
