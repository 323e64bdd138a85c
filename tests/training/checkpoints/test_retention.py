"""Retention of checkpoints: the newest for resuming, the best for their weights."""

from __future__ import annotations

from pipelinerl.training.checkpoints.manifest import TrainingState
from pipelinerl.training.checkpoints.retention import Retention


def test_newest_are_kept_and_hold_back_stream_trimming() -> None:
    retention = Retention(keep=2)
    assert retention.survivors([10, 20, 30, 40], {10: 0.9}) == {30, 40}
    assert retention.resumable([40, 10, 30, 20]) == [30, 40]
    assert retention.resumable([7]) == [7]


def test_best_checkpoints_are_kept_at_any_age_and_streams_are_still_trimmed() -> None:
    retention = Retention(keep=1, keep_best=2)
    accuracies = {10: 0.5, 20: 0.7, 30: 0.6, 40: 0.1, 999: 1.0}
    assert retention.survivors([10, 20, 30, 40], accuracies) == {20, 30, 40}
    assert retention.resumable([20, 30, 40]) == [40]


def test_tie_goes_to_the_later_and_unevaluated_versions_are_never_best() -> None:
    retention = Retention(keep=1, keep_best=1)
    assert retention.survivors([10, 20, 30, 40], {10: 0.5, 20: 0.5}) == {20, 40}
    assert retention.survivors([10, 20, 30], {}) == {30}


def test_accuracy_of_a_checkpoint_is_the_lower_bound_of_its_evaluation() -> None:
    results = [
        {"model_version": 10, "accuracy": 0.5, "at_least": 0.5},
        {"model_version": 20, "accuracy": 0.9, "at_least": 0.3, "incomplete": "1 of 3 problems had no answer"},
        {"model_version": 30, "accuracy": 0.25},
        {"model_version": 40, "accuracy": None, "at_least": None},
    ]
    state = TrainingState(model_version=30, epoch=1, offsets={}, ledger={}, controller={"evaluations": results})
    assert state.accuracies == {10: 0.5, 20: 0.3}
    results.append({"model_version": 20, "at_least": 0.9, "name": "second", "place": 1})
    assert state.accuracies == {10: 0.5, 20: 0.3}, "the recipe's first set decides"
