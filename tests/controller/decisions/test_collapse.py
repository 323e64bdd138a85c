"""The collapse guard, on recorded and on made curves of rewards, and the run's return to a good checkpoint."""

import json
import random
from pathlib import Path

import pytest

from pipelinerl.controller.decisions.collapse import is_collapsed, likely_cause
from pipelinerl.controller.state.evaluation import EvaluationResult
from pipelinerl.controller.state.reward_history import WINDOW, RewardHistory
from pipelinerl.controller.state.run_state import DomainCounts, Rewind, WatchedStep
from pipelinerl.enums import OnCollapse
from tests.controller.world import World, controller

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
#: Recorded runs whose reward fell, for dozens of steps, to less than a quarter of what they started with.
LOST = {("staleness", f"({j}, {k}) plain") for j, k in ((1, 8), (4, 8), (16, 16), (16, 32))}


def recorded():
    curves = {}
    for path in sorted(RESULTS.glob("*.json")):
        runs = json.loads(path.read_text()).get("runs", ())
        for number, run in enumerate(each for each in runs if isinstance(each, dict)):
            place = path.stem, run.get("arm", ""), run.get("seed", number)
            rewards = run["by_samples"][1] if "by_samples" in run else run.get("rewards")
            if rewards:
                curves[(*place, f"{run['cell']} {run['changes']}")] = rewards
            domains = run.get("domains")
            for name, each in domains.items() if isinstance(domains, dict) else ():
                curves[(*place, name)] = each["rewards"]
    return curves


def collapsed_at(rewards):
    history = RewardHistory()
    for step, reward in enumerate(rewards):
        history.note(step, reward)
        if history.is_collapsed:
            return step
    return None


def test_no_recorded_run_is_called_collapsed_that_kept_a_quarter_of_its_first_reward():
    curves = recorded()
    called = {place[:2] for place, rewards in curves.items() if collapsed_at(rewards) is not None}
    assert len(curves) > 150 and called == LOST


def curve(*means, noise=0.05, seed=0):
    """Return noisy rewards: 40 steps that approach each of the means."""
    draw, rewards, mean = random.Random(seed), list[float](), means[0]
    for target in means:
        for _ in range(40):
            mean += (target - mean) / 8
            rewards.append(mean + draw.gauss(0, noise))
    return rewards


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("means", [(0.2, 0.6, 0.3), (0.5, 0.8, 0.7, 0.0), (0.4, 0.02), (-1.0, 0.5, -0.9)])
def test_run_that_loses_what_it_learned_is_called_collapsed_within_forty_steps(means, seed):
    at = collapsed_at(curve(*means, seed=seed))
    assert at is not None and at >= 40 * (len(means) - 1) + WINDOW


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1, 0.3])
@pytest.mark.parametrize("means", [(0.5,) * 10, (0.2, 0.15, 0.3, 0.6), (0.1, 0.9, 0.8, 0.9), (0.0, 0.0, 0.02)])
def test_noise_and_dips_are_no_collapse(means, noise, seed):
    assert collapsed_at(curve(*means, noise=noise, seed=seed)) is None


def result(version, accuracy):
    return EvaluationResult(
        model_version=version, accuracy=accuracy, low=accuracy - 0.05, high=accuracy + 0.05, problems=100, unjudged=0,
        version_min=version, version_max=version, at_least=accuracy,
    )  # fmt: skip


def fallen():
    history = RewardHistory()
    for step, reward in enumerate(curve(0.2, 0.6, 0.2)):
        history.note(step, reward)
    assert history.is_collapsed
    return history


@pytest.mark.parametrize(
    ("accuracies", "rewards", "expected"),
    [
        ({}, RewardHistory(), False),
        ({0: 0.3, 60: 0.7, 120: 0.4, 180: 0.4}, RewardHistory(), True),
        ({0: 0.3, 60: 0.7, 120: 0.4}, RewardHistory(), False),
        ({0: 0.3, 60: 0.7, 120: 0.66, 180: 0.64}, RewardHistory(), False),
        ({0: 0.5, 60: 0.3, 120: 0.3}, RewardHistory(), True),
        ({0: 0.3, 60: 0.7, 120: 0.7}, fallen(), False),
        ({0: 0.3, 60: 0.7, 120: 0.4}, fallen(), True),
        ({}, fallen(), True),
        ({0: 0.3, 70: 0.7}, fallen(), True),  # an evaluation from before the fall does not contradict it
    ],
)
def test_held_out_accuracy_goes_before_the_training_reward(accuracies, rewards, expected):
    assert is_collapsed(rewards, [result(version, accuracy) for version, accuracy in accuracies.items()]) is expected


@pytest.mark.parametrize(
    ("figures", "cause"),
    [
        ({"domains": {"a": DomainCounts(rollouts=10, truncated=5)}}, "50% of the answers hit the token limit"),
        ({"entropy": 0.05}, "the entropy fell from 1 to 0.05"),
        ({"age": 8.0, "ess": 0.3}, "samples are 8.0 versions old"),
        ({"age": 1.0, "ess": 1.0, "entropy": 1.0}, "the learning rate is too high"),
    ],
)
def test_likely_cause_is_named_from_the_figures_at_hand(figures, cause):
    steps = [WatchedStep(step=step, **figures) for step in range(10)]
    assert cause in likely_cause(steps, [1.0] * 10)


def collapsing(version):
    """Return a run after step 12 with `on_collapse = "rewind"`, whose best rewards are those of `version`."""
    rewinds = {"on_collapse": OnCollapse.REWIND, "checkpoint_interval_steps": 5}
    run = World(controller(steps=99, evaluation_problems=0, **rewinds)).begin().until_version(12)
    rewards = RewardHistory(first=0.2, best=0.6, best_version=version, held=WINDOW, recent=[(11.0, 0.1)] * WINDOW)
    run.state.watched.rewards = rewards
    return run


def after_next_step(run):
    return run.until_version(run.version + 1).directive


def test_collapsed_run_returns_to_its_good_version_once_with_half_the_learning_rate():
    run = collapsing(6)
    directive = after_next_step(run)
    assert directive.rewind_to == 6 and directive.knobs.learning_rate == pytest.approx(0.05)
    assert [change.who for change in run.state.knob_log] == ["the collapse guard"]
    run.ready("2", 10)
    assert run.directive.rewind_to == 6, "a trainer that did not return gets the order again"
    run.ready("3", 5)
    assert run.directive.rewind_to is None and run.directive.checkpoint
    assert run.directive.controller_state is not None and run.directive.controller_state["rewound"]
    assert run.directive.knobs.learning_rate == pytest.approx(0.05)
    assert "good_version" not in run.directive.controller_state
    assert run.state.rewind == Rewind(done=True, decided_at=13)


def test_run_that_cannot_return_continues():
    run = collapsing(6)
    assert [after_next_step(run).rewind_to, after_next_step(run).rewind_to] == [6, None] and run.state.rewind.done


def test_changed_domain_weights_begin_a_new_history_of_rewards():
    run = collapsing(6)
    run.controller.patch({"domain_weights.a": 3.0}, who="ada", time=0.0)
    assert run.state.watched.rewards == RewardHistory()
