"""Findings of `pipelinerl check` on the computation of the model: its experts, and what engine and trainer say of it.

The functions yield pairs (part of the recipe, finding)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from pipelinerl import registry
from pipelinerl.component import EngineComponent, TrainerComponent, imported
from pipelinerl.config.recipe import RunConfig
from pipelinerl.enums import RoutingReplay
from pipelinerl.errors import RecipeError
from pipelinerl.models.checkpoint import model_type
from pipelinerl.models.model_shape import REPLAYED, mixture_of
from pipelinerl.roles.engine_rules import routing_of
from trainer_contract.errors import SpecError


def refuse_experts(config: RunConfig) -> None:
    """Raise `RecipeError` unless engine and trainer can compute the model's experts and replay the router's choice."""
    routing_of(config)
    both: tuple[tuple[str, Mapping[str, EngineComponent | TrainerComponent], str], ...] = (
        ("engine", registry.ENGINES, config.engine.type),
        ("trainer", registry.TRAINERS, config.trainer.type),
    )
    for part, components, chosen in both:
        component = components.get(chosen)
        if component is not None and not component.computes_experts and mixture_of(config.model.resolved) is not None:
            raise RecipeError(
                f'{part}.type "{chosen}" computes no mixture of experts, and the model in {config.model.resolved} is '
                f'one; use {part}.type = "torch"'
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


def component_findings(config: RunConfig, others: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    """Yield what engine and trainer find in their sections and the model, each finding once.

    `others` are the directories of critic, reference and teachers by the recipe's key.
    """
    found = dict[tuple[str, str], None]()
    engine, trainer = registry.ENGINES.get(config.engine.type), registry.TRAINERS.get(config.trainer.type)
    try:
        if engine is not None and engine.check:
            found |= dict.fromkeys(imported(engine.check)(config.engine, config.model, {}))
        if trainer is not None and trainer.check:
            found |= dict.fromkeys(imported(trainer.check)(config.trainer, config.model, others))
    except SpecError as error:
        raise RecipeError(f"trainer.{error}" if str(error).startswith("options.") else str(error)) from error
    yield from found
