"""The arms of the TIS benchmark are the note's objectives; its figures are those that steps report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.comparison import table
from benchmarks.finished_run import FinishedRun
from benchmarks.tis import COLUMNS, RECIPE, Arm, Outcome, arms, draw, outcome
from pipelinerl.config.recipe import RunConfig, load
from pipelinerl.enums import WeightFormat
from pipelinerl.numerics import causes
from pipelinerl.objective.presets import resolve
from pipelinerl.objective.statistics import statistics
from pipelinerl.objective.tokens import Tokens
from pipelinerl.observability.events import Event
from pipelinerl.observability.run_history import tell

EPSILON_LOW, EPSILON_HIGH = 0.2, 0.28
#: log π, log π_old, log μ and advantage of some tokens: on and off policy, beyond the clip and beyond the cap.
TOKENS = [
    (-1.0, -1.0, -1.0, 1.0),
    (-1.0, -1.0, -2.5, 1.0),
    (-1.0, -1.0, -2.5, -1.0),
    (-2.0, -2.0, -0.5, 1.0),
    (-2.0, -2.0, -0.5, -1.0),
    (-1.0, -1.6, -1.2, 1.0),
    (-1.6, -1.0, -1.2, -0.5),
]


def _columns() -> dict[str, object]:
    data = np.array(TOKENS)
    size = len(TOKENS)
    return {
        "loss_mask": np.ones(size, dtype=bool),
        "advantages": data[:, 3],
        "weights": np.ones(size),
        "behavior_logprobs": data[:, 2],
        "old_logprobs": data[:, 1],
        "segment_ids": np.zeros(size, dtype=np.int64),
        "num_segments": 1,
    }


def _by_hand(name: str) -> list[float]:
    """d loss / d log π of each token by the note's formulas: −w · A · r where PPO's minimum is not the clipped one."""
    gradients = []
    for current, old, behavior, advantage in TOKENS:
        correction = float(np.exp(old - behavior))
        weight = {"Vanilla-IS": correction, "TIS-2": min(correction, 2.0)}.get(name, 1.0)
        ratio = float(np.exp(current - (behavior if name == "PPO-IS" else old)))
        clipped = min(max(ratio, 1 - EPSILON_LOW), 1 + EPSILON_HIGH)
        moves = ratio * advantage <= clipped * advantage
        gradients.append(-weight * advantage * ratio if moves else 0.0)
    return gradients


def _config(arm: Arm) -> RunConfig:
    return load(RECIPE, list(arm.changes))


@pytest.mark.parametrize("arm", arms([WeightFormat.INT8]), ids=lambda arm: arm.name)
def test_an_arm_is_the_notes_objective(arm: Arm) -> None:
    objective = resolve(_config(arm).objective)
    gradient = objective.prediction_gradient(np.array(TOKENS)[:, 0], _columns())
    assert gradient.tolist() == pytest.approx(_by_hand(arm.name.split()[-1]))


def test_arms_differ_in_objective_and_weights_only() -> None:
    reference, native, *others = (_config(arm) for arm in arms([WeightFormat.INT8, WeightFormat.INT4]))
    assert reference.model_dump() == load(RECIPE).model_dump()
    assert {other.engine.weights for other in others} == {WeightFormat.INT8, WeightFormat.INT4}
    assert native.engine == reference.engine
    for other in (native, *others):
        engine = other.engine.model_copy(update={"weights": WeightFormat.NATIVE})
        same = other.model_copy(update={"engine": engine, "objective": reference.objective})
        assert same == reference


def _events(steps: int) -> list[Event]:
    """A run whose steps report what real ones do."""
    objective = resolve(_config(arms([WeightFormat.INT8])[-1]).objective)
    figures = statistics(objective, Tokens.of(np.array(TOKENS)[:, 0], _columns()))
    current, old, behavior, _ = np.array(TOKENS, np.float32).T
    size = len(TOKENS)
    sampled = causes.SampledTokens(
        logprobs=current,
        behavior_logprobs=behavior,
        old_logprobs=old,
        versions=np.array([3] * (size - 2) + [2] * 2),  # the last two are stale
        turn_versions=np.array([3] * (size - 2) + [2] * 2),
        responses=np.arange(size),
    )
    figures |= causes.figures(sampled, held_version=3, cuts={})
    events: list[Event] = [{"kind": "run_started", "time": 0.0, "elapsed_s": 0.0}]
    for step in range(1, steps + 1):
        scaled = {"logprob_difference_mean": 0.1 * step, "ess": 1.0 - 0.1 * step}
        events.append({"kind": "step", "time": 0.0, "elapsed_s": step, "step": step, **figures, **scaled})
        events.append(
            {"kind": "evaluation", "time": 0.0, "elapsed_s": step, "model_version": step, "accuracy": 0.1 * step}
        )
    return events


def _outcome(name: str, *, seed: int = 0, trained: float = 0.5, completed: bool = True) -> Outcome:
    return outcome(Arm(name, ()), seed, FinishedRun(history=tell(_events(4)), accuracy=trained, completed=completed))


def test_the_figures_are_those_of_the_steps() -> None:
    seen = _outcome("native")
    assert (seen.steps, seen.trained) == (4, 0.5)
    assert seen.served == pytest.approx(0.4)
    assert seen.mismatch == pytest.approx(0.25)
    assert seen.numerics == pytest.approx(4 * 1.5 / 5)
    assert seen.response_max == pytest.approx(2 * (np.exp(-1) - np.exp(-2.5) + np.exp(-0.5) - np.exp(-2)) / 5)
    assert seen.ess == pytest.approx(0.75)
    assert seen.mismatch_max == pytest.approx(1.5)
    assert seen.truncated == pytest.approx(2 / 7)  # exp(1.5) is above 2, twice
    assert seen.clipped == pytest.approx(2 / 7)  # exp(0.6) up, exp(-0.6) down


def test_a_figure_that_steps_do_not_report_is_named() -> None:
    events = [{key: value for key, value in event.items() if key != "ess"} for event in _events(2)]
    with pytest.raises(ValueError, match="to report ess"):
        outcome(Arm("native", ()), 0, FinishedRun(history=tell(events), accuracy=0.5, completed=True))


def test_the_table_has_a_row_for_each_arm_and_says_which_broke_down() -> None:
    runs = [_outcome("native"), _outcome("int8 PPO", completed=False), _outcome("native", seed=1, trained=0.75)]
    heading, rule, native, ppo = table(runs, COLUMNS).splitlines()
    assert heading.count("|") == rule.count("|") == native.count("|")
    assert native.startswith("| native | 0.625 [0.500, 0.750] | 0.400 | 0.25 | 1.5 | 1.2 |")
    assert ppo.startswith("| int8 PPO (1 of 1 broke down) | 0.500 |")


def test_the_figure_is_a_picture(tmp_path: Path) -> None:
    runs = [_outcome(name, seed=seed) for name in ("native", "int8 PPO") for seed in range(2)]
    assert draw(runs, tmp_path / "docs" / "tis.png").read_bytes().startswith(b"\x89PNG")
