"""Checks of a recipe before a run starts: `refuse` is quick, `findings` is thorough and takes seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from inference_contract.weights import Backend
from pipelinerl import registry
from pipelinerl.commands.findings.learning import objective_findings, step_findings
from pipelinerl.commands.findings.problems import MOST, prompt_findings, refuse_problems, verifier_findings
from pipelinerl.commands.findings.trials import called_by_place, filter_tried, tool_format, verifier_tried
from pipelinerl.component import EngineComponent, TrainerComponent, imported
from pipelinerl.config.domains import DomainSection
from pipelinerl.config.recipe import RunConfig
from pipelinerl.config.sections import ModelSection
from pipelinerl.data.mixture import Mixture
from pipelinerl.data.problems import Split, check_source
from pipelinerl.enums import RoutingReplay
from pipelinerl.errors import ModelError, RecipeError
from pipelinerl.models.chat_template import check_chat_template
from pipelinerl.models.checkpoint import (
    check_directory,
    check_values,
    check_weights,
    model_type,
    refuse_quantised,
    vocab_size,
)
from pipelinerl.models.context_limit import context_problem
from pipelinerl.models.directory_files import text_config
from pipelinerl.models.model_shape import REPLAYED, mixture_of
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.models.vocabulary import refuse_other_vocabulary
from pipelinerl.roles.dtypes import dtypes_of
from pipelinerl.roles.engine_rules import check_engine_options, check_truncation, elastic_of, routing_of, servers_of
from pipelinerl.roles.problems import demonstrated_problems, held_out_problems, training_problems
from pipelinerl.roles.verification import open_filter, open_verifier, user_code
from pipelinerl.roles.wiring import is_url, knobs_of, objective_of
from pipelinerl.system.references import place_of
from pipelinerl.system.storage import Storage
from pipelinerl.types import Problem
from trainer_contract.errors import SpecError

#: At most this many bytes of a model's weights are checked for non-finite numbers, so that the check takes seconds.
_MOST_READ: Final = 8 * 2**30


def refuse(config: RunConfig) -> None:
    """Check a recipe's names and settings without reading large files; raise `UserError` for the first problem."""
    check_directory(config.model.resolved)
    refuse_quantised(config.model.resolved)
    check_chat_template(config.model.resolved)
    for location in (config.checkpoint.location, config.parameter_server.copies):
        if location is not None:
            Storage(location)
    registry.find("engine.type", registry.ENGINES, config.engine.type)
    servers_of(config)
    check_engine_options(config)
    elastic_of(config)
    check_truncation(config)
    trainer = registry.find("trainer.type", registry.TRAINERS, config.trainer.type)
    if trainer is not None and config.trainer.options and not trainer.check_options:
        names = ", ".join(config.trainer.options)
        raise RecipeError(f"trainer.type {config.trainer.type!r} takes no options, got {names}; remove them")
    if trainer is not None and trainer.check_options:
        try:
            imported(trainer.check_options)(config.trainer.options)
        except SpecError as error:
            raise RecipeError(f"trainer.{error}") from error
    if config.trainer_devices > 1 and config.trainer.type in registry.MESHES:
        _ = registry.MESHES[config.trainer.type]  # raises `RecipeError` without the plug-in
    registry.find("weights.transport", registry.TRANSPORTS, config.weights.transport)
    if config.verification.uses_services:
        registry.find("verification.judged_in", registry.JUDGED_IN, "services")
    for tracker in config.trackers.chosen:
        registry.find("trackers", registry.TRACKERS, tracker)
    dtypes_of(config)
    refuse_experts(config)
    objective_of(config)
    for key, path in _other_models(config).items():
        try:
            check_directory(path)
            refuse_other_vocabulary(config.model.resolved, path)
        except ModelError as error:
            raise ModelError(f"{key}: {error}") from None
    knobs_of(config)
    for domain in config.domains:
        check_source(domain.source, domain=domain.name)
        if domain.has_verifier:
            open_verifier(domain)
        if domain.has_environment:
            imported(registry.GROUPS["episodes"].check)(domain)
    open_filter(config)


def _other_models(config: RunConfig) -> dict[str, Path]:
    named = {f"{part}.path": section.path for part in ("critic", "reference") if (section := getattr(config, part))}
    named |= {f"domains.{each.name}.teacher": each.teacher for each in config.domains}
    return {
        key: ModelSection(path=path).resolved for key, path in named.items() if path is not None and not is_url(path)
    }


def findings(config: RunConfig, sources: Mapping[Path, Path] = MappingProxyType({})) -> Iterator[tuple[str, str]]:
    """Yield pairs (part of the recipe, finding) for `pipelinerl check`, each part after those it depends on.

    `sources` are the quantised directories for which some of the recipe's stand (`roles.dtypes.outlined`).

    Raises:
        UserError: the first problem that would stop the run.
    """
    refuse(config)
    _check_model(config)
    tokenizer = ChatTokenizer.load(config.model.resolved)
    yield "model", f"{sources.get(config.model.resolved, config.model.resolved)} with {tokenizer.vocab_size} tokens"
    model, known = config.model.resolved, tokenizer.vocab_size
    if (rows := vocab_size(model)) is not None and rows < known:
        sizes = f"the tokenizer of {model} has {known} tokens and its model {rows}; a prompt with one of the others"
        yield "warning", f"{sizes} is refused by engines"
    for path in dict.fromkeys(sources.get(each, each) for each in (model, *_other_models(config).values())):
        if left := check_values(path, most_bytes=_MOST_READ):
            unchecked = f"{left / 2**30:,.1f} GiB of {path} are not checked here"
            yield "model", f"{unchecked}; the trainer checks them when it loads"
    # This import is slow, and `pipelinerl run` does not need it.
    from pipelinerl.roles.engine_role import engine_outside_run

    engine_outside_run(config)
    dtypes = dtypes_of(config)
    engines = f"{config.engine.count} × {config.engine.type}, {config.engine.slots} slots each, in {dtypes.engine}"
    component = registry.ENGINES.get(config.engine.type)
    slow = imported(component.slow_here)(dtypes.engine) if component is not None and component.slow_here else None
    yield "engine", f"{engines}; {slow}" if slow else engines
    yield "trainer", f"{config.trainer.type}, {config.trainer.passes_in}, sends {dtypes.wire}"
    for key, path in _other_models(config).items():
        if sentence := refuse_other_vocabulary(model, path):
            yield "warning", f"{key}: {sentence}"
    yield from component_findings(config, _other_models(config))
    yield from expert_findings(config)
    if keys := keys_without_gpu(config):
        yield "warning", f"{', '.join(keys)} need a GPU, and this machine has none; a run here would end at its start"
    yield from objective_findings(config, tokenizer, lambda: _problems_of(config.trained_domains[0], config).problem(0))
    yield from step_findings(config)
    refuse_problems(config, MOST)
    for where, name in user_code(config):
        yield "user code", f"{where} = {place_of(imported(name))}"
    for domain in config.domains:
        yield from (("warning", sentence) for sentence in called_by_place(domain))
        yield from verifier_findings(config, domain)
        yield from _trials(domain, config, tokenizer)
        if (judge := open_filter(config)) is not None:
            problem = _problems_of(domain, config).problem(0)
            yield "filter", asyncio.run(filter_tried(judge, problem, samples=config.sampling.group_size))
    training, held_out = training_problems(config), held_out_problems(config)
    yield from prompt_findings(config, tokenizer, training=training, held_out=held_out)


def _trials(domain: DomainSection, config: RunConfig, tokenizer: ChatTokenizer) -> Iterator[tuple[str, str]]:
    problems = _problems_of(domain, config)
    if domain.has_verifier:
        yield from asyncio.run(verifier_tried(domain, problems))
    if domain.has_environment:
        kinds = {"text": 0, "a call": 1, "two calls": 2}
        kept = [kind for kind, calls in kinds.items() if tokenizer.tail.reproduces_deployment(calls=calls)]
        yield "template", f"continues {', '.join(kept) or 'nothing'} exactly as it renders a whole conversation"
        yield "template", tool_format(tokenizer)
        yield from _episode_tried(config, domain, problems.problem(0), tokenizer)


def refuse_episodes(config: RunConfig) -> None:
    """Play an episode of each agent with a scripted model; raise `RecipeError` with file and line if it fails."""
    for domain in config.domains:
        if domain.has_environment:
            tokenizer = ChatTokenizer.load(config.model.resolved)
            _episode_tried(config, domain, _problems_of(domain, config).problem(0), tokenizer)


def _episode_tried(
    config: RunConfig, domain: DomainSection, problem: Problem, tokenizer: ChatTokenizer
) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = asyncio.run(
        imported(registry.GROUPS["episodes"].trial)(config, domain, problem, tokenizer)
    )
    return lines


def _problems_of(domain: DomainSection, config: RunConfig) -> Mixture:
    """Return the domain's own training problems, or its held-out problems if the domain is only evaluated."""
    if domain.weight and not domain.is_sampled:
        return demonstrated_problems(config.model_copy(update={"domains": (domain,)}), Split.TRAIN, count=1)
    if domain.weight:
        return training_problems(config.model_copy(update={"domains": (domain,), "evaluations": ()}))
    evaluation = config.evaluation.alone([domain.name])
    return held_out_problems(config, evaluation)[evaluation.name]


def keys_without_gpu(config: RunConfig) -> list[str]:
    """Return the keys of the recipe that need a GPU if this machine has none; the recipe may be for another machine."""
    from pipelinerl.weights.broadcast.collective import offers

    needs = {
        "engine.device": config.engine.device == "cuda",
        "trainer.device": config.trainer.device == "cuda",
        "weights.backend": config.weights.backend is Backend.NCCL,
        "launch.engine_devices": bool(config.launch.engine_devices),
        "launch.trainer_devices": bool(config.launch.trainer_devices),
    }
    return [] if offers(Backend.NCCL) else [key for key, is_needed in needs.items() if is_needed]


def _registered(config: RunConfig) -> Iterator[tuple[str, str, EngineComponent | TrainerComponent]]:
    """Yield section, type and component of engine and trainer, without those that users wrote."""
    if (engine := registry.ENGINES.get(config.engine.type)) is not None:
        yield "engine", config.engine.type, engine
    if (trainer := registry.TRAINERS.get(config.trainer.type)) is not None:
        yield "trainer", config.trainer.type, trainer


def _check_model(config: RunConfig) -> None:
    path = config.model.resolved
    is_special = registry.has_own_type(kind := model_type(path))
    for part, chosen, component in _registered(config):
        if component.model_type != (kind if is_special else ""):
            raise ModelError(f"{part}.type {chosen!r} does not fit the model in {path}, of type {kind!r}")
    if is_special:
        return
    configs = {each: text_config(each) for each in _other_models(config).values()}
    for each, table in {**configs, path: check_weights(path).config}.items():
        if problem := context_problem(table, each, config.engine.context_length):
            raise RecipeError(f"engine.{problem}; lower it")


# --- the model's experts, and what engine and trainer say of the model ------------------------------------------------


def refuse_experts(config: RunConfig) -> None:
    """Raise `RecipeError` unless engine and trainer can compute the model's experts and replay the router's choice."""
    routing_of(config)
    for part, chosen, component in _registered(config):
        if not component.computes_experts and mixture_of(config.model.resolved) is not None:
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
    """Yield each finding of engine and trainer once; `others` are the other models' directories by the recipe's key."""
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
