"""The TIS benchmark compares the objectives of Yao et al. 2025; its metrics come from step events."""

import numpy as np
import pytest

from benchmarks.arms import FinishedRun, Job
from benchmarks.tis import ARMS, RECIPE, figures
from pipelinerl.config.recipe import load
from pipelinerl.enums import WeightFormat
from pipelinerl.numerics import causes
from pipelinerl.objective.presets import resolve
from pipelinerl.objective.statistics import statistics
from pipelinerl.objective.tokens import Tokens
from pipelinerl.observability.run_history import tell

EPSILON_LOW, EPSILON_HIGH = 0.2, 0.28
#: log π, log π_old, log μ and advantage of each token: on-policy and off-policy tokens, and tokens whose ratio exceeds
#: the clip range or the cap of the importance weight.
TOKENS = [
    (-1.0, -1.0, -1.0, 1.0),
    (-1.0, -1.0, -2.5, 1.0),
    (-1.0, -1.0, -2.5, -1.0),
    (-2.0, -2.0, -0.5, 1.0),
    (-2.0, -2.0, -0.5, -1.0),
    (-1.0, -1.6, -1.2, 1.0),
    (-1.6, -1.0, -1.2, -0.5),
]


def _columns():
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


def _expected(name):
    """Return d loss / d log π of each token as in Yao et al. 2025: −w · A · r, or 0 where PPO clips the ratio r."""
    gradients = []
    for current, old, behavior, advantage in TOKENS:
        correction = float(np.exp(old - behavior))
        weight = {"Vanilla-IS": correction, "TIS-2": min(correction, 2.0)}.get(name, 1.0)
        ratio = float(np.exp(current - (behavior if name == "PPO-IS" else old)))
        clipped = min(max(ratio, 1 - EPSILON_LOW), 1 + EPSILON_HIGH)
        moves = ratio * advantage <= clipped * advantage
        gradients.append(-weight * advantage * ratio if moves else 0.0)
    return gradients


def _config(arm):
    return load(RECIPE, ARMS[arm])


@pytest.mark.parametrize("arm", ARMS)
def test_each_run_of_the_tis_benchmark_has_the_gradient_of_the_published_objective(arm):
    objective = resolve(_config(arm).objective)
    gradient = objective.prediction_gradient(np.array(TOKENS)[:, 0], _columns())
    assert gradient.tolist() == pytest.approx(_expected(arm.split()[-1]))


def test_runs_of_the_tis_benchmark_differ_only_in_objective_and_weight_format():
    reference, native, *others = (_config(arm) for arm in ARMS)
    assert reference.model_dump() == load(RECIPE).model_dump()
    assert {other.engine.weights for other in others} == {WeightFormat.INT8}
    assert native.engine == reference.engine
    for other in (native, *others):
        engine = other.engine.model_copy(update={"weights": WeightFormat.NATIVE})
        same = other.model_copy(update={"engine": engine, "objective": reference.objective})
        assert same == reference


def _events(steps):
    objective = resolve(_config(list(ARMS)[-1]).objective)
    reported = statistics(objective, Tokens.of(np.array(TOKENS)[:, 0], _columns()))
    current, old, behavior, _ = np.array(TOKENS, np.float32).T
    size = len(TOKENS)
    sampled = causes.SampledTokens(
        logprobs=current,
        behavior_logprobs=behavior,
        old_logprobs=old,
        versions=np.array([3] * (size - 2) + [2] * 2),  # an older version sampled the last two tokens
        turn_versions=np.array([3] * (size - 2) + [2] * 2),
        responses=np.arange(size),
    )
    reported |= causes.figures(sampled, held_version=3, cuts={})
    events = [{"kind": "run_started", "time": 0.0, "elapsed_s": 0.0}]
    for step in range(1, steps + 1):
        scaled = {"logprob_difference_mean": 0.1 * step, "ess": 1.0 - 0.1 * step}
        events.append({"kind": "step", "time": 0.0, "elapsed_s": step, "step": step, **reported, **scaled})
        events.append(
            {"kind": "evaluation", "time": 0.0, "elapsed_s": step, "model_version": step, "accuracy": 0.1 * step}
        )
    return events


def _finished(events):
    return FinishedRun(config=load(RECIPE), history=tell(events), completed=True, accuracy=0.5)


JOB = Job("native PPO", 0, RECIPE, ())


def test_metrics_of_the_tis_benchmark_are_computed_from_step_events():
    row = figures(JOB, _finished(_events(4)))
    assert row["accuracy"] == 0.5
    assert row["curves"]["accuracy"][1][-1] == pytest.approx(0.4)
    assert row["mismatch"] == pytest.approx(0.25)
    assert row["numerics"] == pytest.approx(4 * 1.5 / 5)
    assert row["ess"] == pytest.approx(0.75)
    assert row["truncated"] == pytest.approx(2 / 7, abs=1e-6), "exp(1.5) is above 2, twice"
    assert row["clipped"] == pytest.approx(2 / 7, abs=1e-6), "exp(0.6) up, exp(-0.6) down"
