"""The arms of the staleness benchmark differ in j, k and the weight; its figures are those that steps report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.finished_run import FinishedRun
from benchmarks.staleness import RECIPE, Arm, Outcome, arms, draw, outcome
from pipelinerl.config.recipe import RunConfig, load
from pipelinerl.objective.presets import resolve
from pipelinerl.observability.events import Event
from pipelinerl.observability.run_history import tell

LOGPROBS = np.array([-1.0, -1.0, -2.0])
BEHAVIOR = np.array([-1.0, -2.5, -0.5])
ADVANTAGES = np.array([1.0, 1.0, -1.0])


def _config(arm: Arm) -> RunConfig:
    return load(RECIPE, list(arm.changes))


@pytest.mark.parametrize("arm", arms(), ids=lambda arm: arm.name)
def test_an_arm_is_reinforce_with_its_weight_under_its_bounds(arm: Arm) -> None:
    config = _config(arm)
    assert (config.staleness.j, config.staleness.k) == (arm.j, arm.k)
    columns = {
        "loss_mask": np.ones(3, dtype=bool),
        "advantages": ADVANTAGES,
        "weights": np.ones(3),
        "behavior_logprobs": BEHAVIOR,
        "segment_ids": np.zeros(3, dtype=np.int64),
        "num_segments": 1,
    }
    weight = np.minimum(np.exp(LOGPROBS - BEHAVIOR), 2.0) if arm.weight == "TIS-2" else np.ones(3)
    gradient = resolve(config.objective).prediction_gradient(LOGPROBS, columns)
    assert gradient.tolist() == pytest.approx((-weight * ADVANTAGES).tolist())


def test_arms_differ_in_bounds_and_objective_only() -> None:
    recipe = load(RECIPE)
    same = [
        config.model_copy(update={"staleness": recipe.staleness, "objective": recipe.objective})
        for config in map(_config, arms())
    ]
    assert all(config == recipe for config in same)


def _events(steps: int) -> list[Event]:
    events: list[Event] = [{"kind": "run_started", "time": 0.0, "elapsed_s": 0.0}]
    for step in range(1, steps + 1):
        figures = {"reward": 0.1 * step, "ess": 0.9, "staleness_mean": 2.0, "rollouts": 8, "sampled_tokens": 90}
        timing = {"wait_s": 0.5, "step_s": 0.5, "stale_tokens": 10 * step}
        events.append({"kind": "step", "time": 0.0, "elapsed_s": 5.0 + step, "step": step, **figures, **timing})
    return events


def _outcome(arm: Arm, *, seed: int = 0) -> Outcome:
    return outcome(arm, seed, FinishedRun(history=tell(_events(4)), accuracy=0.5, completed=True))


def test_the_figures_are_those_of_the_steps() -> None:
    seen = _outcome(arms()[0])
    assert (seen.accuracy, seen.age, seen.ess) == (0.5, 2.0, pytest.approx(0.9))
    assert seen.reward == pytest.approx(0.4)
    assert seen.discarded == pytest.approx(40 / (40 + 360))
    assert seen.tokens_per_s == pytest.approx(360 / 4), "four seconds: the first step began a second before it ended"
    assert seen.by_samples[0] == (8.0, 16.0, 24.0, 32.0)
    assert seen.by_seconds[0] == pytest.approx((1.0, 2.0, 3.0, 4.0))


def test_a_figure_that_steps_do_not_report_is_named() -> None:
    events = [{key: value for key, value in event.items() if key != "stale_tokens"} for event in _events(2)]
    with pytest.raises(ValueError, match="to report stale_tokens"):
        outcome(arms()[0], 0, FinishedRun(history=tell(events), accuracy=0.5, completed=True))


def test_the_figure_is_a_picture(tmp_path: Path) -> None:
    runs = [_outcome(arm, seed=seed) for arm in arms() for seed in range(2)]
    assert draw(runs, tmp_path / "staleness.png").read_bytes().startswith(b"\x89PNG")
