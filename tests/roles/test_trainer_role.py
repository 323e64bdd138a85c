"""The training loop's part of a recipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipelinerl.config.recipe import load
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.errors import RecipeError
from pipelinerl.roles.process import Identity
from pipelinerl.roles.trainer_role import loop_settings, publisher_of
from pipelinerl.weights.broadcast.publisher import BroadcastPublisher


def test_the_loop_knows_the_models_vocabulary() -> None:
    assert loop_settings(load("tiny")).vocab_size == 57


def test_the_publishers_part_of_a_recipe(tmp_path: Path) -> None:
    identity = Identity(
        config=load("tiny", ["weights.timeout_s=900"]),
        run_dir=tmp_path,
        name="trainer",
        redis_url="",
        controller_url="",
        token=None,
    )
    assert loop_settings(identity.config).publish_timeout_s == 900
    assert isinstance(publisher_of(identity, EngineClient()), BroadcastPublisher)
    pulled = replace(identity, config=load("tiny", ["weights.transport=pull"]))
    with pytest.raises(RecipeError, match="the trainer was told of no parameter server"):
        publisher_of(pulled, EngineClient())


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_nccl_without_cuda_is_refused_before_anything_is_published(tmp_path: Path) -> None:
    config = load("tiny", ["weights.backend=nccl"])
    identity = Identity(config=config, run_dir=tmp_path, name="trainer", redis_url="", controller_url="", token=None)
    with pytest.raises(RecipeError, match=r"weights.backend is nccl, which torch cannot use here; say gloo"):
        publisher_of(identity, EngineClient())
