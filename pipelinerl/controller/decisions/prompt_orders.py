"""Prompt orders (requests for a group of rollouts, or of answers to a held-out problem).

An order depends only on its index, the run's seed and the live knobs. A domain's own group size, temperature, length
and stop strings override those of the run and the knob `temperature`. Evaluations use the temperature of their set, and
the set's length limit if it has one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pipelinerl import rng
from pipelinerl.controller.state.evaluation import EvaluationPlan
from pipelinerl.controller.state.run_state import ControllerSettings
from pipelinerl.types import DomainSampling, IssuedAt, Problem, PromptOrder, Purpose


def training_order(
    settings: ControllerSettings, index: int, problem: Problem, *, temperature: float, issued_at: IssuedAt
) -> PromptOrder:
    """Return training order `index`, whose samples answer `problem`; `temperature` is the knob."""
    common, own = settings.sampling, settings.by_domain.get(problem.domain, DomainSampling())
    return PromptOrder(
        order_id=f"prompt-{index:06d}",
        index=index,
        purpose=Purpose.TRAINING,
        problem=problem,
        sampling=replace(
            common,
            num_samples=own.group_size or common.num_samples,
            temperature=temperature if own.temperature is None else own.temperature,
            max_tokens=own.max_tokens or common.max_tokens,
            stop=common.stop if own.stop is None else own.stop,
        ),
        seed=rng.key(settings.run.seed, "sampling", index),
        chat_template_kwargs=own.chat_template_kwargs,
        issued_at=issued_at,
    )


def evaluation_order(
    settings: ControllerSettings,
    plan: EvaluationPlan,
    index: int,
    held_out_problem: Callable[[str, int], Problem],
    *,
    version: int,
    number: int,
    engine: str = "",
) -> PromptOrder:
    """Return the order for question `index` of evaluation `number`, which evaluates `version`.

    `held_out_problem` returns a problem, from its set's name and its index in the set. If `engine` is given, only this
    engine may answer. Apart from id and engine, the order is the same in every evaluation, so a sample depends only on
    seed and weights.
    """
    asked, place = plan.question(index)
    problem = held_out_problem(asked.name, place)
    common, own = settings.sampling, settings.by_domain.get(problem.domain, DomainSampling())
    return PromptOrder(
        order_id=f"eval-{version}-{number}-{index:06d}",
        index=index,
        purpose=Purpose.EVALUATION,
        problem=problem,
        sampling=replace(
            common,
            num_samples=asked.samples,
            temperature=asked.temperature,
            top_p=1.0,
            top_k=0,
            max_tokens=asked.max_tokens or own.max_tokens or common.max_tokens,
            stop=common.stop if own.stop is None else own.stop,
        ),
        seed=rng.key(settings.run.seed, "evaluation", place),
        engine=engine,
        chat_template_kwargs=own.chat_template_kwargs,
    )
