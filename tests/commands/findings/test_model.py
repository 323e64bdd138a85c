"""Findings and errors of `pipelinerl check` about mixtures of experts, and those of engine and trainer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipelinerl.commands.check import component_findings, expert_findings, refuse
from pipelinerl.config.recipe import load
from pipelinerl.errors import RecipeError
from pipelinerl.roles.engine_rules import canary_of
from pipelinerl.roles.trainer_role import loop_settings
from pipelinerl.training.canary_check import ROUTED_APART, TOLERANCES
from trainer_contract.types import RoutingShape

QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8,
    "dtype": "bfloat16", "vocab_size": 64,
}  # fmt: skip
REPLAYED = "trainer.routing_replay=rollout"


@pytest.fixture
def mixture(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors"):
        (tmp_path / name).touch()
    return tmp_path


def recipe(path, overrides):
    return load("tiny", [*([] if path is None else [f"model.path={path}"]), *overrides])


def test_check_shows_the_bytes_per_token_of_routing_replay_and_the_trainer_gets_the_expert_counts(mixture):
    config = recipe(mixture, [REPLAYED])
    refuse(config)
    (finding,) = expert_findings(config)
    assert finding == (
        "experts",
        "48 layers of 128 experts, 8 for each token; their choice is replayed: 384 more bytes per token",
    )
    assert loop_settings(config).routing == RoutingShape(48, 128, 8)
    assert loop_settings(recipe(mixture, [])).routing is None


def test_check_warns_if_the_trainers_routers_choose_experts_independently_of_the_engine(mixture):
    (part, text), (kind, warned) = expert_findings(recipe(mixture, []))
    assert (part, kind) == ("experts", "warning")
    assert text.endswith("the trainer's routers choose independently") and '"rollout" replays' in warned
    assert list(expert_findings(recipe(None, []))) == []


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["engine.type=jax"], r'engine\.type "jax" computes no mixture of experts, .* use engine\.type = "torch"'),
        (["trainer.type=jax"], r'trainer\.type "jax" computes no mixture of experts'),
        ([REPLAYED, "engine.type=jax"], r"each token: torch; engine\.type is 'jax'"),
        ([REPLAYED, "trainer.type=jax"], r"needs trainer\.type torch, got 'jax'"),
    ],
)
def test_mixture_of_experts_is_rejected_for_an_engine_or_trainer_that_cannot_compute_experts(overrides, text, mixture):
    with pytest.raises(RecipeError, match=text):
        refuse(recipe(mixture, overrides))


def test_canary_tolerance_is_larger_if_the_trainer_does_not_replay_the_routing_of_the_engine(mixture):
    """With routing replay, the trainer computes the canary with the engine's experts, so a small tolerance suffices."""
    exact = ["engine.dtype=float32", "weights.dtype=float32"]
    replayed, apart = canary_of(recipe(mixture, [*exact, REPLAYED])), canary_of(recipe(mixture, exact))
    assert (replayed.tolerance, apart.tolerance) == (TOLERANCES["float32"], ROUTED_APART)
    assert (replayed.request(1).return_routed_experts, apart.request(1).return_routed_experts) == (True, False)
    assert canary_of(recipe(mixture, [])).tolerance == TOLERANCES["bfloat16"]


def test_check_shows_what_engine_and_trainer_find_and_names_the_section_of_an_error():
    ((part, text),) = component_findings(recipe(None, ["trainer.device=cpu"]), {})
    assert part == "attention" and text.startswith("buckets of segments of similar length (the device is cpu, and")
    with pytest.raises(RecipeError, match=r'^trainer\.options\.attention = "varlen" is not possible'):
        list(component_findings(recipe(None, ["trainer.device=cpu", "trainer.options.attention=varlen"]), {}))
    assert list(component_findings(recipe(None, ["trainer.type=jax"]), {})) == []
