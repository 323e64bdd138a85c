"""Tests of what `check` and `explain` print about batches of several optimizer steps, and about recorded steps."""

from io import StringIO

import pytest
from rich.console import Console

from pipelinerl.commands.findings.learning import mini_batch_finding
from pipelinerl.config.recipe import load
from pipelinerl.objective.contradictions import doubts
from pipelinerl.objective.presets import resolve
from pipelinerl.plugins.replay.explain import update_table
from pipelinerl.plugins.replay.recorded_run import RecordedStep
from pipelinerl.roles.wiring import setting_of
from pipelinerl.training.rollouts.admission import Lineage

SEVERAL = ("training.epochs=2", "training.mini_batches=4")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ((), None),
        (
            SEVERAL,
            "epochs: 2, mini-batches in each: 4, of about 8 whole groups; 8 optimizer steps for each version; with "
            "k = 2, tokens train at most 16 optimizer steps after sampling",
        ),
        (
            ("training.epochs=3", "training.target_kl=0.05", "staleness.k=inf"),
            "epochs: 3, mini-batches in each: 1, of about 32 whole groups; 3 optimizer steps for each version, fewer "
            "once the KL from π_old exceeds 0.05",
        ),
    ],
)
def test_check_shows_the_number_of_optimizer_steps_per_batch(changes, text):
    assert mini_batch_finding(load("tiny", changes)) == text


def messages_of(objective, *changes):
    config = load("tiny", changes)
    return list(doubts(resolve(objective) if isinstance(objective, str) else objective, setting_of(config)))


def test_check_warns_of_ppo_clipping_that_has_no_effect_with_one_optimizer_step_per_batch():
    (alone,) = messages_of("ppo_recomputed")
    assert alone.startswith("grad1 clips π_θ/π_old, which is always 1 here") and "training.epochs" in alone
    assert messages_of("ppo_recomputed", *SEVERAL) == []


def test_check_warns_if_a_batch_has_several_optimizer_steps_and_the_objective_has_no_policy_ratio():
    plain = resolve({"preset": "pipelinerl", "is_weight": "one"})
    assert messages_of(plain) == []
    (several,) = messages_of(plain, *SEVERAL)
    assert several.startswith("grad1 and is_weight hold no ratio of the current policy, and a batch is 8 optimizer")
    assert messages_of("pipelinerl", *SEVERAL) == []


def test_explain_shows_the_optimizer_steps_of_a_recorded_step_as_a_table():
    step = RecordedStep(version=3, lineage=Lineage(1, 0), orders=(), figures={"learning_rate": 0.1})
    assert update_table(step) is None and step.learning_rates == [0.1]
    updates = [{"epoch": 1.0, "mini_batch": n, "loss": 0.5, "learning_rate": 0.1 * n} for n in (1.0, 2.0)]
    several = RecordedStep(version=3, lineage=Lineage(1, 0), orders=(), figures={}, updates=updates)
    assert several.learning_rates == [0.1, 0.2]
    console = Console(file=StringIO(), width=120)
    console.print(update_table(several))
    assert [line.split() for line in console.file.getvalue().splitlines()[2:]] == [
        ["1", "1", "0.5", "0.1"],
        ["1", "2", "0.5", "0.2"],
    ]
