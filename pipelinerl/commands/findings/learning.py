"""Findings of `pipelinerl check` on how the run learns: objective, losses, teachers, size of a step and staleness."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from pipelinerl.config.domains import DomainSection
from pipelinerl.config.recipe import RunConfig
from pipelinerl.controller.state.knobs import Knobs
from pipelinerl.controller.state.lag import UNPRICED
from pipelinerl.engines.http.engine_teacher import TEACHER_TOKEN, EngineTeacher
from pipelinerl.engines.http.openai_client import models_at
from pipelinerl.enums import OldLogprobs, Overdue
from pipelinerl.errors import AddressError, EngineUnreachable, RecipeError
from pipelinerl.models.checkpoint import weight_files
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.objective.contradictions import doubts
from pipelinerl.objective.presets import differing, preset_of, resolve, slot_lines
from pipelinerl.objective.streams import Loss
from pipelinerl.roles.wiring import is_url, knobs_of, losses_of, objective_of, references_of, setting_of
from pipelinerl.types import Problem

#: Timeout in seconds of a request to a teacher.
_TEACHER_S: Final = 10.0
#: Ends of the names of parameters with a row for each token.
_EMBEDDINGS: Final = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "lm_head.weight")


def objective_findings(
    config: RunConfig, tokenizer: ChatTokenizer, first: Callable[[], Problem]
) -> Iterator[tuple[str, str]]:
    """Yield findings on the objective, its losses and teachers; `first` returns the first training problem."""
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
            yield from _teacher_tried(place, config, first(), tokenizer)
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


def step_findings(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield findings on the size of a step, its optimizer steps, staleness and kept weights."""
    knobs = knobs_of(config)
    # If group sizes differ, the last group of a step may exceed the step's target.
    rollouts = config.training.rollouts_per_step
    sizes = {each.name: config.group_size_of(each) for each in config.trained_domains}
    if len(set(sizes.values())) == 1:
        (size,) = set(sizes.values())
        yield "step", f"{rollouts} rollouts, {config.groups_per_step} groups of {size}"
    else:
        unit = math.gcd(*sizes.values())
        most = (rollouts - 1) // unit * unit + max(sizes.values())
        groups = ", ".join(f"of {size} from {name}" for name, size in sizes.items())
        yield "step", f"{rollouts} to {most} rollouts, about {config.groups_per_step} whole groups: {groups}"
    if several := mini_batch_finding(config):
        yield "mini-batches", several
    yield "staleness", _staleness(config, knobs)
    if config.training.old_logprobs is OldLogprobs.SAMPLING_WEIGHTS:
        each = sum(file.stat().st_size for file in weight_files(config.model.resolved)) / 2**20
        versions = math.ceil(knobs.k / (knobs.j or 1))  # only every j-th version is published
        yield (
            "old log-probs",
            f"{versions} versions of the weights, {versions * each:,.0f} MiB of the trainer's host memory and of each "
            f"checkpoint ({knobs.k * each:,.0f} MiB at most, if engines join at every step)",
        )


def mini_batch_finding(config: RunConfig) -> str | None:
    """Describe how a batch is divided into optimizer steps; None if a batch is a single optimizer step."""
    training, k = config.training, knobs_of(config).k
    if (updates := training.epochs * training.mini_batches) == 1:
        return None
    each = config.groups_per_step / training.mini_batches
    oldest = (
        ""
        if math.isinf(k)
        else f"; with k = {k:g}, tokens train at most {k * updates:g} optimizer steps after sampling"
    )
    kl = "" if training.target_kl is None else f", fewer once the KL from π_old exceeds {training.target_kl:g}"
    return (
        f"epochs: {training.epochs}, mini-batches in each: {training.mini_batches}, of about {each:.3g} whole groups; "
        f"{updates} optimizer steps for each version{kl}{oldest}"
    )


def _staleness(config: RunConfig, knobs: Knobs) -> str:
    held = f"j = {knobs.j}"
    if knobs.j is None:
        objective = objective_of(config)
        held = "auto: the run chooses j and the lag that it holds"
        if objective.lag_loss(config.training.old_logprobs) is None:
            held = f"auto: {UNPRICED}"
    bounds = f"{held}, k = {knobs.k:g}, {knobs.groups_in_flight} groups in flight"
    if len(config.trained_domains) == 1 or config.staleness.overdue is Overdue.WAIT or math.isinf(knobs.k):
        return bounds
    return (
        f"{bounds}; groups older than k at their step are dropped, mostly from domains with long answers or slow "
        'verifiers; watch their stale share, or keep such groups with staleness.overdue = "wait"'
    )
