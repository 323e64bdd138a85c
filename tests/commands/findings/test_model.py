"""Findings and errors of `pipelinerl check` about mixtures of experts, attention kernels and device meshes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.commands.check import refuse
from pipelinerl.commands.findings.model import attention_findings, expert_findings, mesh_findings
from pipelinerl.config.recipe import RunConfig, load
from pipelinerl.errors import RecipeError
from pipelinerl.roles.trainer_role import canary_of, loop_settings
from pipelinerl.training.canary_check import ROUTED_APART, TOLERANCES
from trainer_contract.types import RoutingShape

QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "dtype": "bfloat16",
    "vocab_size": 64,
}
ON_GPU = ("trainer.device=cuda", "trainer.precision=bf16")
REPLAYED = "trainer.routing_replay=rollout"


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors"):
        (tmp_path / name).touch()
    return tmp_path


def recipe(path: Path | None, overrides: Sequence[str]) -> RunConfig:
    return load("tiny", [*([] if path is None else [f"model.path={path}"]), *overrides])


def test_check_shows_the_bytes_per_token_of_routing_replay_and_the_trainer_gets_the_expert_counts(
    mixture: Path,
) -> None:
    config = recipe(mixture, [REPLAYED])
    refuse(config)
    (finding,) = expert_findings(config)
    assert finding == (
        "experts",
        "48 layers of 128 experts, 8 for each token; their choice is replayed: 384 more bytes per token",
    )
    assert loop_settings(config).routing == RoutingShape(48, 128, 8)
    assert loop_settings(recipe(mixture, [])).routing is None


def test_check_warns_if_the_trainers_routers_choose_experts_independently_of_the_engine(mixture: Path) -> None:
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
def test_mixture_of_experts_is_rejected_for_an_engine_or_trainer_that_cannot_compute_experts(
    overrides: list[str], text: str, mixture: Path
) -> None:
    with pytest.raises(RecipeError, match=text):
        refuse(recipe(mixture, overrides))


def test_routing_replay_is_rejected_for_a_model_without_experts() -> None:
    with pytest.raises(RecipeError, match=r'routing_replay = "rollout": the model in .* has no experts'):
        refuse(recipe(None, [REPLAYED]))


def test_canary_tolerance_is_larger_if_the_trainer_does_not_replay_the_routing_of_the_engine(mixture: Path) -> None:
    """With routing replay, the trainer computes the canary with the engine's experts, so a small tolerance suffices."""
    exact = ["engine.dtype=float32", "weights.dtype=float32"]
    replayed, apart = canary_of(recipe(mixture, [*exact, REPLAYED])), canary_of(recipe(mixture, exact))
    assert (replayed.tolerance, apart.tolerance) == (TOLERANCES["float32"], ROUTED_APART)
    assert (replayed.request(1).return_routed_experts, apart.request(1).return_routed_experts) == (True, False)
    assert canary_of(recipe(mixture, [])).tolerance == TOLERANCES["bfloat16"]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["trainer.device=cpu"], "buckets of segments of similar length (the device is cpu, and the kernel needs"),
        (["trainer.device=cuda"], "buckets of segments of similar length (the precision is fp32, and the kernel"),
        ([*ON_GPU], "varlen, one kernel over all segments of a row, if its trial on that GPU succeeds"),
        ([*ON_GPU, "trainer.options.attention=varlen"], "varlen, one kernel over all segments of a row, if its trial"),
        (
            [*ON_GPU, "trainer.options.attention=buckets"],
            "buckets of segments of similar length (set by options.attention",
        ),
    ],
)
def test_check_shows_the_attention_kernel_for_packed_rollouts(overrides: list[str], text: str) -> None:
    ((part, sentence),) = attention_findings(recipe(None, overrides))
    assert part == "attention" and sentence.startswith(text)


def test_check_rejects_the_varlen_kernel_on_a_cpu() -> None:
    with pytest.raises(
        RecipeError, match=r'^trainer\.options\.attention = "varlen" is not possible: the device is cpu, and'
    ):
        list(attention_findings(recipe(None, ["trainer.device=cpu", "trainer.options.attention=varlen"])))


def test_check_says_which_models_train_padded_and_rejects_what_needs_packed_rows() -> None:
    ((part, sentence),) = attention_findings(recipe(None, []), "reference.path", packs=False)
    assert part == "attention" and sentence.startswith("reference.path trains padded: packed, it would compute otherw")
    for override in ("trainer.options.attention=varlen", "trainer.options.mesh.cp=2"):
        with pytest.raises(
            RecipeError, match=r"^trainer\.options\..* packed rows; the model trains padded, so leave it"
        ):
            list(attention_findings(recipe(None, [override]), packs=False))


def test_check_shows_expert_parallelism_or_rejects_a_mesh_that_divides_experts_unevenly(mixture: Path) -> None:
    empty = b"{}"
    (mixture / "model.safetensors").write_bytes(len(empty).to_bytes(8, "little") + empty)
    (mixture / "config.json").write_text(json.dumps(QWEN3_30B | {"hidden_size": 64, "num_attention_heads": 4}))
    travelling = ["trainer.options.mesh.dp_shard=4", "trainer.options.experts=parallel"]
    ((part, text),) = mesh_findings(recipe(mixture, travelling))
    assert part == "mesh" and text.endswith("4 micro-batches at once; tokens travel to their experts")
    for path, mesh, sentence in (
        (mixture, 3, "a layer has 128 experts, which 3 processes cannot divide"),
        (None, 2, "a layer has 0 experts"),
    ):
        with pytest.raises(RecipeError, match=f'^trainer.options.experts = "parallel": {sentence}'):
            list(mesh_findings(recipe(path, [*travelling, f"trainer.options.mesh.dp_shard={mesh}"])))
