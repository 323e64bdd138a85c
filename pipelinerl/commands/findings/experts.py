"""What `check` finds of a mixture-of-experts model: who can compute it, and whose routers choose the experts."""

from __future__ import annotations

from collections.abc import Iterator

from pipelinerl import registry
from pipelinerl.choices import RoutingReplay
from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import RecipeError
from pipelinerl.models.checkpoint import model_type
from pipelinerl.models.routing import REPLAYED, mixture_of
from pipelinerl.roles.wiring import routing_of


def refuse_experts(config: RunConfig) -> None:
    """Raise RecipeError for experts that somebody cannot compute, or whose choice cannot be replayed."""
    routing_of(config)
    for part, chosen in (("engine", config.engine.type), ("trainer", config.trainer.type)):
        if chosen == "jax" and mixture_of(config.model.resolved) is not None:
            raise RecipeError(
                f'{part}.type "jax" computes no mixture of experts, and the model in {config.model.resolved} is one; '
                f'use {part}.type = "torch"'
            )


def expert_findings(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Nothing of a model without experts."""
    shape = mixture_of(config.model.resolved)
    if shape is None:
        return
    sizes = f"{shape.layers} layers of {shape.experts} experts, {shape.top_k} for each token"
    if config.trainer.routing_replay is RoutingReplay.ROLLOUT:
        yield "experts", f"{sizes}; their choice is replayed, {shape.bytes_per_token} bytes of a token beside its 8"
        return
    yield "experts", f"{sizes}; the trainer's routers choose by themselves"
    tells = config.engine.type in registry.TELLS_ROUTING and config.trainer.type in registry.REPLAYS_ROUTING
    if tells and model_type(config.model.resolved) in REPLAYED:
        yield (
            "warning",
            'with trainer.routing_replay = "off" engine and trainer choose experts apart, and not always the same: '
            '"rollout" replays the engine\'s choice (docs/mixtures.md)',
        )
