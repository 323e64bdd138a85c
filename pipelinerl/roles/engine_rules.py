"""Rules of a recipe's engines: servers, options, log-probs, automatic scaling, and how the trainer checks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from inference_contract.schemas import ChatMessage
from pipelinerl import registry
from pipelinerl.component import imported
from pipelinerl.config.recipe import RunConfig
from pipelinerl.config.sections import ElasticSection
from pipelinerl.engines.options import EngineOptions
from pipelinerl.enums import RoutingReplay, WeightFormat
from pipelinerl.errors import ModelError, RecipeError
from pipelinerl.models.model_shape import mixture_of, replayed_routing
from pipelinerl.roles.dtypes import dtypes_of, on_accelerator
from pipelinerl.roles.problems import training_problems
from pipelinerl.system.references import is_reference
from pipelinerl.training.canary_check import ROUTED_APART, TOLERANCES, Canary
from pipelinerl.training.engine_proofs import Replica
from trainer_contract.host_weights import num_bytes
from trainer_contract.types import Device, ParameterInfo, Precision, RoutingShape, WeightDType

#: The largest model, in bytes as it is sent, of which the trainer loads a replica of the engines.
_MOST_REPLICATED: Final = 2**30


def check_truncation(config: RunConfig) -> None:
    """Raise `RecipeError` if training rollouts are truncated and an engine cannot report the policy's log-probs.

    Log-probs of the truncated distribution would make every ratio over them too small, by the probability of the tokens
    that are kept.
    """
    sampling = config.sampling
    if not (config.trained_domains and sampling.of_an_order.truncates):
        return
    for key, type in (("engine.type", config.engine.type), *(("elastic.types", each) for each in config.elastic.types)):
        if type not in registry.ENGINES.having("reports_policy") and not is_reference(type):
            raise RecipeError(
                f"sampling.top_p = {sampling.top_p:g} and top_k = {sampling.top_k} need an engine that reports "
                f"log-probs from before this truncation, as the trainer computes them, and {key} {type!r} cannot; use "
                f"{', '.join(sorted(registry.ENGINES.having('reports_policy')))}, or set top_p = 1 and top_k = 0"
            )


def elastic_of(config: RunConfig) -> ElasticSection | None:
    """Return the rule by which engines are added and removed, if any; raise `RecipeError` if it cannot be followed."""
    for type, limits in config.elastic.types.items():
        own = registry.is_user_code(registry.ENGINES, type)
        servers = registry.ENGINES.having("drives_server")
        if not own and (type not in registry.ENGINES or type in servers):
            started = ", ".join(name for name in registry.ENGINES if name not in servers)
            raise RecipeError(
                f"elastic.types must name engines that can be started: {started}, or code of your own; got {type!r}"
            )
        count = config.engine.count
        if type == config.engine.type and not limits.min <= count <= limits.max:
            raise RecipeError(
                f"engine.count ({count}) must be within elastic.types.{type}, from {limits.min} to {limits.max}"
            )
    return config.elastic if config.elastic.types else None


def servers_of(config: RunConfig) -> tuple[str, ...]:
    """Return the URLs of external servers, one per engine, or none; `RecipeError` if their number does not fit."""
    section, types = config.engine, registry.ENGINES.having("drives_server")
    if section.type not in types:
        if section.servers:
            raise RecipeError(
                f"engine.servers are for the types {' and '.join(sorted(types))}, got engine.type "
                f"{section.type}; remove them"
            )
    elif len(section.servers) < section.count:
        raise RecipeError(
            f"engine.servers must name one server for each of the {section.count} engines, got {len(section.servers)}; "
            'set engine.servers=["http://host:port"]'
        )
    return section.servers


def options_of(config: RunConfig) -> EngineOptions:
    """Return the options of the recipe's engines, without what only an engine's own process knows."""
    section, dtypes = config.engine, dtypes_of(config)
    return EngineOptions(
        model_path=config.model.resolved,
        model_id=config.model.path.removeprefix("shipped:"),
        slots=section.slots,
        max_waiting=section.max_waiting,
        context_length=section.context_length,
        dtype=dtypes.engine,
        wire_dtype=dtypes.wire,
        weights=section.weights,
        head_precision=config.model.head_precision,
        kernels=config.model.kernels,
        device=section.device,
        devices=section.devices,
        memory_share=section.memory_share,
        options=section.options,
        threads=config.launch.threads,
        seed=config.run.seed,
        receiver=section.receiver,
    )


def check_engine_options(config: RunConfig) -> None:
    """Raise `RecipeError` for `engine.options` of a type that takes none, or that other keys set already."""
    options, chosen = config.engine.options, config.engine.type
    if not options:
        return
    component = registry.ENGINES.get(chosen)
    if component is None:
        return  # the user's engine checks its own options
    if component.drives_server:
        raise RecipeError(
            f"engine.options {', '.join(options)} would not reach a server that runs already; start the server with "
            "them, and remove them here"
        )
    if not component.check_options:
        raise RecipeError(f"engine.type {chosen!r} takes no options, got {', '.join(options)}; remove them")
    imported(component.check_options)(options)


def routing_of(config: RunConfig) -> RoutingShape | None:
    """Return the sizes of the routing that is replayed, if it is; `RecipeError` if a part of the run cannot replay."""
    replay = config.trainer.routing_replay
    if replay is RoutingReplay.OFF:
        return None
    setting = f'trainer.routing_replay = "{replay}"'
    if config.engine.type not in registry.ENGINES.having("reports_routing") and not is_reference(config.engine.type):
        raise RecipeError(
            f"{setting} needs an engine that reports which experts computed each token: "
            f"{' or '.join(registry.ENGINES.having('reports_routing'))}; engine.type is {config.engine.type!r}"
        )
    if config.trainer.type not in registry.TRAINERS.having("replays_routing") and not is_reference(config.trainer.type):
        raise RecipeError(f"{setting} needs trainer.type torch, got {config.trainer.type!r}")
    try:
        return replayed_routing(config.model.resolved)
    except ModelError as error:
        raise RecipeError(f"{setting}: {error}") from None


def canary_of(config: RunConfig) -> Canary:
    """Return the canary: the first training problem, as a prompt whose log-probs show if an engine's weights are right.

    The tolerated difference follows from the least precise dtype that weights pass through from trainer to engine.
    """
    problem = training_problems(config).problem(0)
    replay, coarsest = config.trainer.routing_replay, dtypes_of(config).coarsest(config)
    routed_apart = replay is RoutingReplay.OFF and mixture_of(config.model.resolved) is not None
    return Canary(
        messages=tuple(ChatMessage.model_construct(role=m.role, content=m.content) for m in problem.messages),
        context_length=config.engine.context_length,
        tolerance=ROUTED_APART if routed_apart and coarsest == "float32" else TOLERANCES[coarsest],
        temperature=config.sampling.temperature or 1.0,
        routing_replay=replay,
    )


def replica_of(config: RunConfig, layout: Sequence[ParameterInfo]) -> Replica | None:
    """Return a replica of the run's engines; None if they compute as the trainer does, on a GPU, or a large model."""
    section, dtypes = config.engine, dtypes_of(config)
    computes = WeightDType.FLOAT32 if config.trainer.passes_in is Precision.FP32 else WeightDType.BFLOAT16
    is_alike = dtypes.engine is computes and section.weights is WeightFormat.NATIVE
    if is_alike or section.type not in registry.ENGINES.having("replica") or on_accelerator(section.device):
        return None
    if sum(map(num_bytes, layout)) > _MOST_REPLICATED:
        return None
    options = replace(options_of(config), device=Device.CPU, threads=None)
    replica: Replica = imported(registry.ENGINES[section.type].replica)(options)
    return replica
