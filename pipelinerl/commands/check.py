"""Checks of a recipe before a run starts: `refuse` is quick, `findings` is thorough and takes seconds."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from inference_contract.weights import Backend
from pipelinerl import registry
from pipelinerl.commands.findings.model import (
    adapter_findings,
    attention_findings,
    expert_findings,
    mesh_findings,
    refuse_experts,
    trial_findings,
)
from pipelinerl.commands.findings.problems import MOST, prompt_findings, refuse_problems, verifier_findings
from pipelinerl.commands.findings.schedule import mini_batch_finding, stale_share
from pipelinerl.commands.findings.trials import (
    called_by_place,
    episode_tried,
    filter_tried,
    tool_format,
    verifier_tried,
)
from pipelinerl.component import imported
from pipelinerl.config.domains import DomainSection
from pipelinerl.config.recipe import RunConfig
from pipelinerl.config.sections import ModelSection
from pipelinerl.controller.state.knobs import Knobs
from pipelinerl.data.mixture import Mixture
from pipelinerl.data.problems import Split, check_source
from pipelinerl.engines.http.engine_teacher import TEACHER_TOKEN, EngineTeacher
from pipelinerl.engines.http.openai_client import models_at
from pipelinerl.enums import OldLogprobs, Overdue
from pipelinerl.errors import AddressError, EngineUnreachable, ModelError, RecipeError
from pipelinerl.models import bigram
from pipelinerl.models.chat_template import check_chat_template
from pipelinerl.models.checkpoint import (
    check_directory,
    check_values,
    check_weights,
    model_type,
    refuse_quantised,
    vocab_size,
    weight_files,
)
from pipelinerl.models.context_limit import context_problem
from pipelinerl.models.directory_files import text_config
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.models.vocabulary import refuse_other_vocabulary
from pipelinerl.objective.contradictions import doubts
from pipelinerl.objective.explain import differing, slot_lines
from pipelinerl.objective.presets import preset_of, resolve
from pipelinerl.objective.streams import Loss
from pipelinerl.roles.dtypes import dtypes_of
from pipelinerl.roles.episodes import check_environment
from pipelinerl.roles.verification import open_filter, open_verifier, user_code
from pipelinerl.roles.wiring import (
    check_engine_options,
    check_truncation,
    demonstrated_problems,
    elastic_of,
    held_out_problems,
    is_url,
    knobs_of,
    losses_of,
    objective_of,
    references_of,
    servers_of,
    setting_of,
    training_problems,
)
from pipelinerl.system.references import is_reference, place_of
from pipelinerl.system.storage import Storage
from pipelinerl.types import Problem
from trainer_contract.errors import SpecError

#: At most this many bytes of a model's weights are checked for non-finite numbers, so that the check takes seconds.
_MOST_READ: Final = 8 * 2**30
#: Timeout in seconds of a request to a teacher.
_TEACHER_S: Final = 10.0
#: Ends of the names of parameters with a row for each token.
_EMBEDDINGS: Final = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "lm_head.weight")


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
        check_environment(domain)
    open_filter(config)


def _other_models(config: RunConfig) -> dict[str, Path]:
    named = {f"{part}.path": section.path for part in ("critic", "reference") if (section := getattr(config, part))}
    named |= {f"domains.{each.name}.teacher": each.teacher for each in config.domains}
    return {
        key: ModelSection(path=path).resolved for key, path in named.items() if path is not None and not is_url(path)
    }


def findings(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield pairs (part of the recipe, finding) for `pipelinerl check`, each part after those it depends on.

    Raises:
        UserError: the first problem that would stop the run.
    """
    refuse(config)
    _check_model(config)
    tokenizer = ChatTokenizer.load(config.model.resolved)
    yield "model", f"{config.model.resolved} with {tokenizer.vocab_size} tokens"
    model, known = config.model.resolved, tokenizer.vocab_size
    if (rows := vocab_size(model)) is not None and rows < known:
        sizes = f"the tokenizer of {model} has {known} tokens and its model {rows}; a prompt with one of the others"
        yield "warning", f"{sizes} is refused by engines"
    for path in dict.fromkeys([model, *_other_models(config).values()]):
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
    yield from trial_findings(config, _other_models(config))
    yield from adapter_findings(config)
    yield from attention_findings(config)
    yield from mesh_findings(config)
    yield from expert_findings(config)
    if keys := keys_without_gpu(config):
        yield "warning", f"{', '.join(keys)} need a GPU, and this machine has none; a run here would end at its start"
    yield from _objective_findings(config, tokenizer)
    knobs = knobs_of(config)
    yield "step", _step(config)
    if several := mini_batch_finding(config):
        yield "mini-batches", several
    yield "staleness", _staleness(config, knobs)
    if config.training.old_logprobs is OldLogprobs.SAMPLING_WEIGHTS:
        yield "old log-probs", _weight_history(config, knobs)
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
    yield from prompt_findings(
        config, tokenizer, training=training_problems(config), held_out=held_out_problems(config)
    )


def _trials(domain: DomainSection, config: RunConfig, tokenizer: ChatTokenizer) -> Iterator[tuple[str, str]]:
    problems = _problems_of(domain, config)
    if domain.has_verifier:
        yield from asyncio.run(verifier_tried(domain, problems))
    if domain.has_environment:
        kinds = {"text": 0, "a call": 1, "two calls": 2}
        kept = [kind for kind, calls in kinds.items() if tokenizer.tail.reproduces_deployment(calls=calls)]
        yield "template", f"continues {', '.join(kept) or 'nothing'} exactly as it renders a whole conversation"
        yield "template", tool_format(tokenizer)
        yield from asyncio.run(episode_tried(config, domain, problems.problem(0), tokenizer))


def refuse_episodes(config: RunConfig) -> None:
    """Play an episode of each agent with a scripted model, as `check` does; raise `RecipeError` if it fails.

    The message has the file and the line of the agent's code. Without agents, this takes no time.
    """
    for domain in config.domains:
        if domain.has_environment:
            tokenizer = ChatTokenizer.load(config.model.resolved)
            asyncio.run(episode_tried(config, domain, _problems_of(domain, config).problem(0), tokenizer))


def _problems_of(domain: DomainSection, config: RunConfig) -> Mixture:
    """Return the domain's own training problems, or its held-out problems if the domain is only evaluated."""
    if domain.weight and not domain.is_sampled:
        return demonstrated_problems(config.model_copy(update={"domains": (domain,)}), Split.TRAIN, count=1)
    if domain.weight:
        return training_problems(config.model_copy(update={"domains": (domain,), "evaluations": ()}))
    evaluation = config.evaluation.alone([domain.name])
    return held_out_problems(config, evaluation)[evaluation.name]


def _objective_findings(config: RunConfig, tokenizer: ChatTokenizer) -> Iterator[tuple[str, str]]:
    objective, name = objective_of(config), preset_of(config.objective)
    needs = ", ".join(sorted(objective.passes | objective.needs)) or "nothing beyond the rollouts"
    others = differing(objective, resolve(name, max_tokens=config.sampling.max_tokens))
    yield "objective", f"{name}{', changed in ' + ', '.join(others) if others else ''}; needs {needs}"
    for line in slot_lines(objective):
        preset = f"  ({name} has {others[line.slot]})" if line.slot in others else ""
        yield "objective", f"{line.slot} = {line.kind}{preset}"
    for domain in config.domains if losses_of(config).others else ():
        if domain.weight:
            yield "loss", f"{domain.name}: {_loss(domain, config)}"
    for place in dict.fromkeys(references_of(config, objective).values()):
        if is_url(place):
            problem = _problems_of(config.trained_domains[0], config).problem(0)
            yield from _teacher_tried(place, config, problem, tokenizer)
    for sentence in doubts(objective, setting_of(config)):
        yield "warning", f"objective.{sentence}"


def _teacher_tried(
    url: str, config: RunConfig, problem: Problem, tokenizer: ChatTokenizer
) -> Iterator[tuple[str, str]]:
    """Yield findings on a teacher's engine; raise `RecipeError` if it has too few tokens."""
    longest, text, token = config.engine.context_length, problem.messages[-1].content, os.environ.get(TEACHER_TOKEN)
    try:
        card = asyncio.run(models_at(url, token=token))[0]
    except AddressError as error:
        yield "warning", f"the teacher {url} does not answer now, and the trainer will need it: {error}"
        return
    most = card.get("context_length")
    if not isinstance(most, int):
        yield "warning", f"the teacher {url} gives no context_length; it must be an engine of the inference contract"
        return
    if (rows := _rows_of(card)) is not None and rows < tokenizer.vocab_size:
        raise RecipeError(
            f"the teacher {url} has a vocabulary of {rows} tokens, and the policy's tokenizer makes "
            f"{tokenizer.vocab_size}; use a teacher with the same tokenizer"
        )
    if most <= longest:
        yield (
            "warning",
            f"the teacher {url} reads at most {most} tokens, and prompt and answer may have {longest}; "
            f"start it with engine.context_length={longest + 1}",
        )
    else:
        yield "teacher", f"{url} serves {card['id']}, up to {most} tokens"
    teacher = EngineTeacher(url, token=token, timeout_s=_TEACHER_S)
    try:
        prompt = teacher.tokens_of(text)
    except EngineUnreachable as error:
        yield "warning", f"the tokens of the teacher {url} are not compared with the policy's: {error}"
        return
    finally:
        teacher.close()
    # The chat template may join its own characters to the first and the last token of the text.
    inner = tokenizer.encode(text)[1:-1]
    if not any(prompt[start : start + len(inner)] == inner for start in range(len(prompt))):
        yield (
            "warning",
            f"the teacher {url} seems to have another tokenizer: its tokens for {text!r:.60} are not the policy's; "
            "its log-probs would then be of another text",
        )


def _rows_of(card: Mapping[str, Any]) -> int | None:
    """Return the number of tokens of a served model from the layout in its card; None if it has no usable layout."""
    try:
        shapes = {str(each["name"]): each["shape"] for each in card["layout"]["parameters"]}
        return max((int(shape[0]) for name, shape in shapes.items() if name.endswith(_EMBEDDINGS)), default=None)
    except (LookupError, TypeError, ValueError):
        return None


def _loss(domain: DomainSection, config: RunConfig) -> str:
    times = "" if domain.loss_weight == 1.0 else f"{domain.loss_weight:g} × "
    match domain.loss:
        case Loss.CE:
            share = domain.weight / sum(each.weight for each in config.demonstrated_domains)
            number = f"{config.demonstrations_per_update * share:.3g}"
            return f"{times}ce, the mean over the tokens of about {number} right answers in each optimizer step"
        case Loss.REF_KL:
            teacher = domain.teacher or (config.reference.place if config.reference else "") or "the initial policy"
            return f"{times}ref_kl to {teacher}, the mean over its sampled tokens; rewards are only reported"
    return f"{times}rl, the objective"


def _staleness(config: RunConfig, knobs: Knobs) -> str:
    bounds = f"j = {knobs.j}, k = {knobs.k:g}, {knobs.groups_in_flight} groups in flight"
    if share := stale_share(config):
        bounds += f"; {share}"
    if len(config.trained_domains) == 1 or config.staleness.overdue is Overdue.WAIT or math.isinf(knobs.k):
        return bounds
    return (
        f"{bounds}; groups older than k at their step are dropped, mostly from domains with long answers or slow "
        'verifiers; watch their stale share, or keep such groups with staleness.overdue = "wait"'
    )


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


def _step(config: RunConfig) -> str:
    # If group sizes differ, the last group of a step may exceed the step's target.
    rollouts = config.training.rollouts_per_step
    sizes = {each.name: config.group_size_of(each) for each in config.trained_domains}
    if len(set(sizes.values())) == 1:
        (size,) = set(sizes.values())
        return f"{rollouts} rollouts, {config.groups_per_step} groups of {size}"
    unit = math.gcd(*sizes.values())
    most = (rollouts - 1) // unit * unit + max(sizes.values())
    groups = ", ".join(f"of {size} from {name}" for name, size in sizes.items())
    return f"{rollouts} to {most} rollouts, about {config.groups_per_step} whole groups: {groups}"


def _weight_history(config: RunConfig, knobs: Knobs) -> str:
    """Describe the memory that past versions of the weights take; about k / j versions are kept.

    Rollouts of the last k versions may be trained on, and only every j-th version is published.
    """
    each = sum(file.stat().st_size for file in weight_files(config.model.resolved)) / 2**20
    versions = math.ceil(knobs.k / knobs.j)
    return (
        f"{versions} versions of the weights, {versions * each:,.0f} MiB of the trainer's host memory and of each "
        f"checkpoint ({knobs.k * each:,.0f} MiB at most, if engines join at every step)"
    )


def _check_model(config: RunConfig) -> None:
    path = config.model.resolved
    is_bigram = model_type(path) == bigram.MODEL_TYPE
    for part, chosen in (("engine", config.engine.type), ("trainer", config.trainer.type)):
        if not is_reference(chosen) and is_bigram != (chosen == "bigram"):
            raise ModelError(f"{part}.type {chosen!r} does not fit the model in {path}, of type {model_type(path)!r}")
    if is_bigram:
        bigram.BigramModel.load(path)
        return
    configs = {each: text_config(each) for each in _other_models(config).values()}
    for each, table in {**configs, path: check_weights(path).config}.items():
        if problem := context_problem(table, each, config.engine.context_length):
            raise RecipeError(f"engine.{problem}; lower it")
