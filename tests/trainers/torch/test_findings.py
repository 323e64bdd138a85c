"""Findings and rejections of `pipelinerl check` on the torch trainer's attention and mesh."""

import json

import pytest

from pipelinerl.config.recipe import MODELS, load
from pipelinerl.config.sections import ModelSection
from pipelinerl.trainers.torch.findings import attention_finding, mesh_findings, padded_finding
from trainer_contract.errors import SpecError

MIXTURE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "dtype": "bfloat16",
    "vocab_size": 64,
    "hidden_size": 64,
    "num_attention_heads": 4,
}
ON_GPU = ("trainer.device=cuda", "trainer.precision=bf16")


def recipe(overrides):
    config = load("tiny", overrides)
    return config.trainer, config.model.resolved


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
def test_finding_names_the_attention_kernel_for_packed_rollouts(overrides, text):
    assert attention_finding(*recipe(overrides)).startswith(text)


def test_padded_training_is_shown_and_settings_that_need_packed_rows_are_rejected():
    section, path = recipe([])
    model = ModelSection(path=str(path))
    assert padded_finding(section, model, "reference.path").startswith("reference.path trains padded: packed, it would")
    for override in ("trainer.options.attention=varlen", "trainer.options.mesh.cp=2"):
        with pytest.raises(SpecError, match=r"^options\..* packed rows; the model trains padded, so leave it"):
            padded_finding(recipe([override])[0], model, "model.path")


def test_expert_parallelism_is_shown_and_a_mesh_that_divides_experts_unevenly_is_rejected(tmp_path):
    empty = b"{}"
    (tmp_path / "model.safetensors").write_bytes(len(empty).to_bytes(8, "little") + empty)
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    travelling = ["trainer.options.mesh.dp_shard=4", "trainer.options.experts=parallel"]
    ((part, text),) = mesh_findings(recipe(travelling)[0], tmp_path)
    assert part == "mesh" and text.endswith("4 micro-batches at once; tokens travel to their experts")
    for path, mesh, sentence in (
        (tmp_path, 3, "a layer has 128 experts, which 3 processes cannot divide"),
        (MODELS / "tiny_speller", 2, "a layer has 0 experts"),
    ):
        with pytest.raises(SpecError, match=f'^options.experts = "parallel": {sentence}'):
            list(mesh_findings(recipe([*travelling, f"trainer.options.mesh.dp_shard={mesh}"])[0], path))
