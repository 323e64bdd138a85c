"""Findings of `pipelinerl check` on the computation of the model: experts, adapters, attention and device mesh.

The functions yield pairs (part of the recipe, finding)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from inference_contract.weights import Backend
from pipelinerl import registry
from pipelinerl.config.recipe import RunConfig
from pipelinerl.enums import RoutingReplay
from pipelinerl.errors import ModelError, RecipeError
from pipelinerl.models.checkpoint import load_structure, model_type
from pipelinerl.models.decoder_config import read_config
from pipelinerl.models.directory_files import text_config
from pipelinerl.models.model_shape import REPLAYED, mixture_of, read_shape
from pipelinerl.roles.wiring import routing_of
from trainer_contract.errors import SpecError
from trainer_contract.types import Device


def refuse_experts(config: RunConfig) -> None:
    """Raise `RecipeError` unless engine and trainer can compute the model's experts and replay the router's choice."""
    routing_of(config)
    for part, chosen in (("engine", config.engine.type), ("trainer", config.trainer.type)):
        if chosen == "jax" and mixture_of(config.model.resolved) is not None:
            raise RecipeError(
                f'{part}.type "jax" computes no mixture of experts, and the model in {config.model.resolved} is one; '
                f'use {part}.type = "torch"'
            )


def expert_findings(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield findings on a mixture of experts; nothing for other models."""
    shape = mixture_of(config.model.resolved)
    if shape is None:
        return
    sizes = f"{shape.layers} layers of {shape.experts} experts, {shape.top_k} for each token"
    if config.trainer.routing_replay is RoutingReplay.ROLLOUT:
        yield "experts", f"{sizes}; their choice is replayed: {shape.bytes_per_token} more bytes per token"
        return
    yield "experts", f"{sizes}; the trainer's routers choose independently"
    engine, trainer = registry.ENGINES.get(config.engine.type), registry.TRAINERS.get(config.trainer.type)
    tells = engine is not None and engine.reports_routing and trainer is not None and trainer.replays_routing
    if tells and model_type(config.model.resolved) in REPLAYED:
        yield (
            "warning",
            'with trainer.routing_replay = "off" engine and trainer choose experts independently and may differ: '
            '"rollout" replays the engine\'s choice (docs/understand/mixtures.md)',
        )


def trial_findings(config: RunConfig, others: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    """Let engine and trainer compute small random models of the same configurations; yield what could not be tried.

    `others` maps keys of the recipe to directories of critic, reference and teachers, which the trainer computes.
    Raises `UserError` with the sentence with which the run would end at its start.
    """
    model = config.model.resolved
    if "jax" in (config.engine.type, config.trainer.type):
        read_config(model)
    trained = {"model.path": model, **others} if config.trainer.type == "torch" else {}
    served = {"model.path": model} if config.engine.type == "torch" else {}
    for key, path in (trained | served).items():
        from pipelinerl.engines.torch import engine
        from pipelinerl.trainers.torch import packed_model

        skeleton = load_structure(path, part="trunk" if key == "critic.path" else "causal_lm")
        tried = True
        try:
            if key in served:
                tried = engine.refuse_different(skeleton, config.model.kernels)
            if key in trained:
                choice = packed_model.choose_rows(skeleton)
                tried = choice.was_tried and tried
                yield from attention_findings(config, key, packs=choice.packs)
        except ModelError as error:
            raise ModelError(f"{key}: {error}") from error
        if not tried:
            yield (
                "warning",
                f"{key}: no small model of the configuration of {type(skeleton).__name__} runs in transformers, so "
                "engine and trainer are first tried when the run starts",
            )


def adapter_findings(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield findings on LoRA adapters; raise `RecipeError` if the model lacks the layers that should get adapters."""
    if config.trainer.type != "torch" or config.trainer.options.get("lora") is None:
        return
    from pipelinerl.trainers.torch.lora.lora_options import lora_of
    from pipelinerl.trainers.torch.lora.targets import described

    try:
        options = lora_of(config.trainer.options)
        if options is not None:
            yield "adapters", described(config.model.resolved, options)
    except SpecError as error:
        raise RecipeError(f"trainer.{error}") from error


def attention_findings(config: RunConfig, key: str = "model.path", *, packs: bool = True) -> Iterator[tuple[str, str]]:
    """Yield how the torch trainer computes the model `key`; raise `RecipeError` if it cannot compute as requested."""
    from pipelinerl.trainers.torch.options import options_of
    from pipelinerl.trainers.torch.packed.attention_choice import (
        PADDED,
        HeadShapes,
        SegmentAttention,
        chosen,
        described,
        refuse_padded,
        why_not_varlen,
    )
    from pipelinerl.weights.broadcast.collective import offers

    try:
        options = options_of(config.trainer.options)
        if not packs:
            refuse_padded(options.attention, config.model.kernels, cp=options.mesh.cp)
            yield "attention", f"{key} trains padded: {PADDED}"
            return
        if key != "model.path":
            return
        is_cuda = config.trainer.device is Device.CUDA or (
            config.trainer.device is Device.AUTO and offers(Backend.NCCL)
        )
        why_not = why_not_varlen(
            device="cuda" if is_cuda else "cpu",
            precision=config.trainer.passes_in,
            capability=None,  # do not inspect this machine's GPU: the run may use another machine
            has_kernel=True,
            widths=HeadShapes.of(text_config(config.model.resolved)).widths,
        )
        is_varlen = chosen(options.attention, why_not) is SegmentAttention.VARLEN
        trial = ", if its trial on that GPU succeeds" if is_varlen else ""
        yield "attention", described(options.attention, why_not) + trial
    except SpecError as error:
        raise RecipeError(f"trainer.{error}" if str(error).startswith("options.") else str(error)) from error


def mesh_findings(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield findings on the trainer's mesh; raise `RecipeError` if it cannot divide the heads or experts evenly."""
    if config.trainer.type != "torch" or config.trainer.options.get("mesh") is None:
        return
    from pipelinerl.trainers.torch.mesh import ExpertWeights, refuse_heads, refuse_uneven_experts
    from pipelinerl.trainers.torch.options import options_of

    options = options_of(config.trainer.options)
    mesh = options.mesh
    if mesh.size == 1:
        return
    try:
        refuse_heads(read_shape(config.model.resolved).heads, mesh.cp)
        is_parallel = options.experts is ExpertWeights.PARALLEL
        if is_parallel:
            mixture = mixture_of(config.model.resolved)
            refuse_uneven_experts(0 if mixture is None else mixture.experts, mesh.shards)
    except SpecError as error:
        raise RecipeError(f"trainer.{error}") from error
    shared = f", each computed by {mesh.cp} processes" if mesh.cp > 1 else ""
    travel = "; tokens travel to their experts" if is_parallel else ""
    yield (
        "mesh",
        f"{mesh.size} processes, a copy of the model over {mesh.shards}; {mesh.width} micro-batches at once"
        f"{shared}{travel}",
    )
