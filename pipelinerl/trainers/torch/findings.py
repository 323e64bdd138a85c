"""Findings of `pipelinerl check` on the torch trainer: a trial of the model, adapters, attention and mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from transformers import PreTrainedModel

from inference_contract.weights import Backend
from pipelinerl.config.sections import ModelSection, TrainerSection
from pipelinerl.models.directory_files import text_config
from pipelinerl.models.model_shape import mixture_of, read_shape
from pipelinerl.models.torch_miniature import trial
from pipelinerl.trainers.torch.lora import described as described_adapters
from pipelinerl.trainers.torch.mesh import ExpertWeights, refuse_heads, refuse_uneven_experts
from pipelinerl.trainers.torch.options import lora_of, options_of
from pipelinerl.trainers.torch.packed.attention_choice import (
    PADDED,
    HeadShapes,
    SegmentAttention,
    chosen,
    described,
    refuse_padded,
    why_not_varlen,
)
from pipelinerl.trainers.torch.packed_model import choose_rows
from pipelinerl.weights.broadcast.collective import offers
from trainer_contract.types import Device


def findings(section: TrainerSection, model: ModelSection, others: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    """Yield pairs (part of the recipe, finding); for the arguments and errors see `TrainerComponent.check`."""
    directory, packs = model.resolved, dict[str, bool]()
    for key, path in {"model.path": directory, **others}.items():

        def tried(skeleton: PreTrainedModel, key: str = key) -> bool:
            choice = choose_rows(skeleton)
            packs[key] = choice.packs
            return choice.was_tried

        yield from trial(key, path, tried)
    if section.options.get("lora") is not None and (options := lora_of(section.options)) is not None:
        yield "adapters", described_adapters(directory, options)
    for key in [key for key, packed in packs.items() if not packed]:
        yield "attention", padded_finding(section, model, key)
    if packs["model.path"]:
        yield "attention", attention_finding(section, directory)
    yield from mesh_findings(section, directory)


def padded_finding(section: TrainerSection, model: ModelSection, key: str) -> str:
    """Say that the model of the recipe's `key` trains padded; raise `SpecError` for what needs packed rows."""
    options = options_of(section.options)
    refuse_padded(options.attention, model.kernels, cp=options.mesh.cp)
    return f"{key} trains padded: {PADDED}"


def attention_finding(section: TrainerSection, model: Path) -> str:
    """Describe the attention over packed rollouts; raise `SpecError` if a requested kernel is unusable."""
    is_cuda = section.device is Device.CUDA or (section.device is Device.AUTO and offers(Backend.NCCL))
    why_not = why_not_varlen(
        device="cuda" if is_cuda else "cpu",
        precision=section.passes_in,
        capability=None,  # do not inspect this machine's GPU: the run may use another machine
        has_kernel=True,
        widths=HeadShapes.of(text_config(model)).widths,
    )
    requested = options_of(section.options).attention
    trial = ", if its trial on that GPU succeeds" if chosen(requested, why_not) is SegmentAttention.VARLEN else ""
    return described(requested, why_not) + trial


def mesh_findings(section: TrainerSection, model: Path) -> Iterator[tuple[str, str]]:
    """Yield a finding on a mesh of several processes; raise `SpecError` if it cannot divide heads or experts evenly."""
    options = options_of(section.options)
    mesh = options.mesh
    if mesh.size == 1:
        return
    refuse_heads(read_shape(model).heads, mesh.cp)
    is_parallel = options.experts is ExpertWeights.PARALLEL
    if is_parallel:
        mixture = mixture_of(model)
        refuse_uneven_experts(0 if mixture is None else mixture.experts, mesh.shards)
    shared = f", each computed by {mesh.cp} processes" if mesh.cp > 1 else ""
    travel = "; tokens travel to their experts" if is_parallel else ""
    yield (
        "mesh",
        f"{mesh.size} processes, a copy of the model over {mesh.shards}; {mesh.width} micro-batches at once"
        f"{shared}{travel}",
    )
