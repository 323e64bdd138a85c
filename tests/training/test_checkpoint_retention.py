"""Which checkpoints stay: the newest to go on from, the best for their weights."""

from __future__ import annotations

from pipelinerl.training.checkpoint_manifest import TrainingState
from pipelinerl.training.checkpoint_retention import Retention


def test_the_newest_stay_and_are_what_the_streams_wait_for() -> None:
    retention = Retention(keep=2)
    assert retention.survivors([10, 20, 30, 40], {10: 0.9}) == {30, 40}
    assert retention.resumable([40, 10, 30, 20]) == [30, 40]
    assert retention.resumable([7]) == [7]


def test_the_best_stay_however_old_and_the_streams_do_not_wait_for_them() -> None:
    retention = Retention(keep=1, keep_best=2)
    accuracies = {10: 0.5, 20: 0.7, 30: 0.6, 40: 0.1, 999: 1.0}
    assert retention.survivors([10, 20, 30, 40], accuracies) == {20, 30, 40}
    assert retention.resumable([20, 30, 40]) == [40]


def test_of_equals_the_later_is_better_and_what_has_no_accuracy_is_not_among_the_best() -> None:
    retention = Retention(keep=1, keep_best=1)
    assert retention.survivors([10, 20, 30, 40], {10: 0.5, 20: 0.5}) == {20, 40}
    assert retention.survivors([10, 20, 30], {}) == {30}


def test_accuracies_are_those_of_evaluations_that_were_completed() -> None:
    results = [
        {"model_version": 10, "accuracy": 0.5},
        {"model_version": 20, "accuracy": 0.9, "incomplete": "updates could not be held back any longer"},
        {"model_version": 30, "accuracy": 0.25, "incomplete": ""},
        {"model_version": 40, "accuracy": None, "incomplete": ""},
    ]
    state = TrainingState(model_version=30, epoch=1, offsets={}, ledger={}, controller={"evaluations": results})
    assert state.accuracies == {10: 0.5, 30: 0.25}
