"""The weight history keeps published weights whose samples may still train (bound k), also across a restart."""

import logging
import math
from dataclasses import replace

import numpy as np
import pytest

from pipelinerl.errors import CheckpointError, RecordError
from pipelinerl.objective.presets import resolve
from pipelinerl.training.weight_history import WeightHistory
from tests.fakes.batches import batch_of, bigram
from tests.fakes.rollouts import group, rollout

VOCAB = 7
BYTES = VOCAB * VOCAB * 4


@pytest.fixture
def trainer(tmp_path):
    return bigram(tmp_path / "model", vocab=VOCAB)


def stepped(trainer):
    objective = resolve("grpo")
    batch = batch_of([group(0)], objective, producing=trainer.model_version + 1, token_budget=99)
    trainer.backward([batch.micro_batches[0]], objective)
    trainer.optimizer_step(learning_rate=0.1)
    return trainer


def published(trainer, history, ks):
    """For each staleness bound in `ks`, publish a version and take a step; return the versions held after each
    publication.
    """
    held = []
    for k in ks:
        history.keep(trainer, version=trainer.model_version, acceptance=k)
        held.append(history.versions)
        stepped(trainer)
    return held


def test_weight_history_holds_the_versions_whose_samples_the_next_step_may_use(trainer):
    history = WeightHistory(trainer.weight_layout())
    assert published(trainer, history, [2, 2, 2, 4, 4, 1, 3]) == [
        [0], [0, 1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [5], [5, 6]
    ]  # fmt: skip
    assert history.num_bytes == 2 * BYTES
    assert history.figures() == {"history_versions": 2.0, "history_bytes": 2.0 * BYTES}


def test_weight_history_holds_only_published_weights(trainer):
    """Every third version is published, so only two of the six versions that may have sampled are held."""
    history, expected = WeightHistory(trainer.weight_layout()), {}
    for version in range(8):
        if version % 3 == 0:
            history.keep(trainer, version=version, acceptance=6)
            expected[version] = next(trainer.gather_weights())[1].copy()
        stepped(trainer)
    assert history.versions == [3, 6]
    for version in history.versions:
        (data,) = history.weights(version).values()
        np.testing.assert_array_equal(data.view(np.float32), expected[version].ravel())


def test_weight_history_is_restored_from_a_checkpoint(trainer, tmp_path):
    history = WeightHistory(trainer.weight_layout())
    published(trainer, history, [3, 3, 3])
    history.saver()(tmp_path)
    again = WeightHistory.restored(tmp_path, trainer.weight_layout())
    assert again.versions == [0, 1, 2]
    for version in again.versions:
        assert again.weights(version)["bigram.logits"].tobytes() == history.weights(version)["bigram.logits"].tobytes()
    assert WeightHistory.restored(tmp_path / "absent", trainer.weight_layout()).versions == []


def test_weight_history_rejects_damaged_files_and_files_of_another_model(trainer, tmp_path):
    history = WeightHistory(trainer.weight_layout())
    published(trainer, history, [1])
    history.saver()(tmp_path)
    (wider,) = trainer.weight_layout()
    with pytest.raises(CheckpointError, match=r"version-000000.safetensors cannot be used: the parameter 'bigram.log"):
        WeightHistory.restored(tmp_path, [replace(wider, shape=(9, 9))])
    (file,) = tmp_path.glob("version-*")
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="choose another checkpoint"):
        WeightHistory.restored(tmp_path, trainer.weight_layout())


def test_weight_history_logs_a_missing_version_once(trainer, caplog):
    history = WeightHistory(trainer.weight_layout())
    published(trainer, history, [math.inf, math.inf, 1])
    mixed = replace(group(0), rollouts=(rollout(version=2), rollout(spans=[(1, 1), (2, 1)])))
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="pipelinerl"):
        assert [history.covers(each) for each in (group(1, version=2), mixed, mixed)] == [True, False, False]
    (message,) = caplog.messages
    assert "weights of version 1 are not kept, so their samples cannot train and count as stale" in message
    with pytest.raises(RecordError, match=r"the weights of version 1 are no longer kept.*; kept are 2"):
        history.weights(1)
