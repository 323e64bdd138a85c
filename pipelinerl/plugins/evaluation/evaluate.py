"""`pipelinerl eval`: evaluates a checkpoint, a model directory or a server at a URL on the recipe's held-out problems.

It uses the same problems as the evaluations during the run and, on this project's engines, the same sampling noise.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pipelinerl import rng
from pipelinerl.config.evaluation import EvaluationSet
from pipelinerl.config.recipe import RunConfig, parse, to_table
from pipelinerl.controller.decisions.evaluator import evaluation_order
from pipelinerl.controller.state.answer_figures import (
    AnswerFigures,
    PassAt,
    figures_by_domain,
    figures_by_tag,
    figures_of,
)
from pipelinerl.errors import RecipeError
from pipelinerl.messages import EvaluationDone
from pipelinerl.observability.summary import interval
from pipelinerl.plugins.evaluation.evaluation_loop import (
    AnswerLog,
    answer_log,
    ask,
    digest_of_domains,
    run_until_interrupted,
)
from pipelinerl.plugins.evaluation.respondents import Target, respondent
from pipelinerl.roles.new_controller import plan_of, settings_of
from pipelinerl.roles.problems import held_out_problems
from pipelinerl.types import PromptOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """Settings and results of an evaluation; `seconds` excludes the engine's start.

    Three fields count problems: `asked` those sent in this call, `incomplete` those without an answer, and `unjudged`
    those whose answer could not be judged.
    """

    target: str
    version: int
    name: str
    split: str
    problems: int
    asked: int
    samples: int
    temperature: float
    max_tokens: int
    seconds: float
    incomplete: int
    unjudged: int
    figures: AnswerFigures
    by_domain: Mapping[str, AnswerFigures]
    by_tag: Mapping[str, AnswerFigures]


def evaluate(
    target: Target, config: RunConfig, *, token: str | None, model: str, console: Console, out: Path | None = None
) -> EvaluationReport:
    """Evaluate the target; progress goes to `console`.

    If the file `out` is given, problems that have a result in this file are skipped, and new results are added to it.

    Raises:
        UserError: no problem was answered, or the file `out` holds results of other settings.
    """
    evaluation = config.evaluation_sets[0]
    if not evaluation.problems:
        raise RecipeError("evaluation.problems is 0, so there is nothing to evaluate; set --problems")
    with ExitStack() as stack:
        log = None
        if out is not None:
            question = _question(target, config, evaluation, model=model)
            log = stack.enter_context(answer_log(out, question, EvaluationDone))
        return run_until_interrupted(_evaluated(target, config, log, token=token, model=model, console=console))


def show(report: EvaluationReport, console: Console, *, as_json: bool) -> None:
    """Print the report as a table or as JSON."""
    if as_json:
        sys.stdout.write(json.dumps(msgspec.to_builtins(report), indent=2) + "\n")
        return
    console.print(_table(report))
    notes = [f"{report.samples} × {report.asked} samples in {report.seconds:.1f} s"]
    if report.asked < report.problems:
        notes.append(f"{report.problems - report.asked} problems were answered before")
    if report.incomplete:
        notes.append(f"{report.incomplete} problems had no answer")
    if report.unjudged:
        notes.append(f"{report.unjudged} could not be judged")
    console.print("; ".join(notes), highlight=False)


def with_one_evaluation(config: RunConfig, name: str, given: Mapping[str, Any]) -> RunConfig:
    """Return the recipe with only the named evaluation set (by default the first), updated by the settings `given`.

    Raises:
        RecipeError: there is no such set, or the changes are invalid.
    """
    names = [each.name for each in config.evaluation_sets]
    if name and name not in names:
        raise RecipeError(f"--evaluation {name!r} is not one of the recipe's evaluation sets: {', '.join(names)}")
    table = to_table(config)
    chosen = [each for each in table["evaluations"] if each["name"] == (name or names[0])] or [{}]
    changed = chosen[0] | {key: value for key, value in given.items() if value is not None}
    own_name = chosen[0].get("name") or given.get("split") or names[0]
    return parse(table | {"evaluations": [changed | {"name": own_name}]})


def held_out_orders(config: RunConfig, version: int) -> Iterator[PromptOrder]:
    """Yield the prompt orders (work requests) of the recipe's first evaluation set, as a run's controller does."""
    evaluation = config.evaluation_sets[0]
    settings, plan, problems = settings_of(config), plan_of(config, [evaluation]), held_out_problems(config, evaluation)
    mixture = problems[evaluation.name]
    return (
        evaluation_order(settings, plan, index, lambda _, index: mixture.problem(index), version=version, number=0)
        for index in range(plan.problems)
    )


async def _evaluated(
    target: Target,
    config: RunConfig,
    log: AnswerLog[EvaluationDone] | None,
    *,
    token: str | None,
    model: str,
    console: Console,
) -> EvaluationReport:
    orders = list(await asyncio.to_thread(lambda: list(held_out_orders(config, target.version))))
    answers: dict[int, EvaluationDone | None] = {each.index: each for each in (log.answers if log else ())}
    missing = [order for order in orders if order.index not in answers]
    seconds = 0.0
    if missing:
        async with respondent(target, config, token=token, model=model) as answering:
            began = time.monotonic()
            with Progress(console=console, transient=True) as progress:
                bar = progress.add_task("evaluating", total=len(orders), completed=len(orders) - len(missing))

                def note(order: PromptOrder, answer: EvaluationDone | None) -> None:
                    if log is not None and answer is not None:
                        log.add(answer)
                    answers[order.index] = answer
                    progress.advance(bar)

                await ask(missing, answering, config, on_answer=note)
            seconds = time.monotonic() - began
    # The log may also hold answers to problems that this call does not evaluate.
    of_these = {order.index: answers.get(order.index) for order in orders}
    return _report(target, config, of_these, asked_now=len(missing), seconds=seconds)


def _question(target: Target, config: RunConfig, evaluation: EvaluationSet, *, model: str) -> dict[str, Any]:
    """Return the settings on which answers depend; an `AnswerLog` refuses results made with other settings."""
    # These settings matter only for an engine that this command starts, not for a server.
    engine = {"type", "dtype", "weights", "context_length"}
    return {
        "target": target.named(model),
        "split": evaluation.split,
        "samples": evaluation.samples,
        "temperature": evaluation.temperature,
        "max_tokens": evaluation.max_tokens or config.sampling.max_tokens,
        "stop": list(config.sampling.stop),
        "seed": config.run.seed,
        "domains": digest_of_domains(domain for domain in config.domains if domain.name in evaluation.domains),
        "engine": config.engine.model_dump(mode="json", include=engine) if target.model is not None else {},
        "weights": target.fingerprint,
    }


def _report(
    target: Target,
    config: RunConfig,
    answers: Mapping[int, EvaluationDone | None],
    *,
    asked_now: int,
    seconds: float,
) -> EvaluationReport:
    section = config.evaluation_sets[0]
    done = [answer for _, answer in sorted(answers.items()) if answer is not None]
    domains = [domain for domain in config.domains if domain.name in section.domains]
    ks = sorted({*section.pass_at, *({section.samples} - {1})})
    seed = rng.key(rng.key(config.run.seed, "evaluation-interval"), target.version)
    figures = figures_of(done, pass_at=ks, seed=seed)
    return EvaluationReport(
        target=target.name,
        version=target.version,
        name=section.name,
        split=section.split,
        problems=section.problems,
        asked=asked_now,
        samples=section.samples,
        temperature=section.temperature,
        max_tokens=max(config.evaluation_max_tokens_of(each, section) for each in domains),
        seconds=seconds,
        incomplete=section.problems - len(done),
        unjudged=len(done) - figures.problems,
        figures=figures,
        by_domain=figures_by_domain(done, pass_at=ks, seed=seed),
        by_tag=figures_by_tag(done, pass_at=ks, seed=seed),
    )


def _table(report: EvaluationReport) -> Table:
    def share(value: float | None) -> str:
        return "–" if value is None else f"{value:.1%}"

    def chances(of_all: list[PassAt], estimates: list[PassAt]) -> list[str]:
        by_k = {each.k: each.value for each in estimates}
        return [share(by_k.get(each.k)) for each in of_all]

    heads = [f"pass@{each.k}" for each in report.figures.pass_at]
    heads += [f"maj@{each.k}" for each in report.figures.majority_at]
    title = f"{report.target}: {report.name}"
    table = Table("", "problems", "accuracy", "95 %", *heads, "tokens", "P95", "truncated", title=title)
    by_domain = report.by_domain if len(report.by_domain) > 1 else {}
    for section in filter(None, ({"all": report.figures}, by_domain, report.by_tag)):
        table.add_section()
        for name, figures in section.items():
            table.add_row(
                name,
                f"{figures.problems}",
                share(figures.accuracy),
                interval({"low": figures.low, "high": figures.high}) or "–",
                *chances(report.figures.pass_at, figures.pass_at),
                *chances(report.figures.majority_at, figures.majority_at),
                *("–" if value is None else f"{value:.0f}" for value in (figures.length_mean, figures.length_p95)),
                share(figures.truncated),
            )
    return table
