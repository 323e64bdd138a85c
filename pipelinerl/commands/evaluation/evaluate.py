"""`pipelinerl eval`: a run's checkpoint, a model directory, or what serves at a URL, on the recipe's held-out problems.

It asks what the run's own evaluations ask: the same problems, and of an engine of ours the same noise. The figures are
`answer_figures`'.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pipelinerl import rng
from pipelinerl.commands.evaluation.asking import ask, run_until_interrupted
from pipelinerl.commands.evaluation.respondents import Target, respondent
from pipelinerl.config.recipe import RunConfig
from pipelinerl.controller.decisions.prompt_orders import PromptOrderFactory
from pipelinerl.controller.state.answer_figures import (
    AnswerFigures,
    PassAt,
    figures_by_domain,
    figures_by_tag,
    figures_of,
)
from pipelinerl.errors import RecipeError
from pipelinerl.messages import EvaluationDone
from pipelinerl.roles.controller_role import settings_of
from pipelinerl.roles.wiring import held_out_problems
from pipelinerl.types import PromptOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """What was asked of whom, and what the answers show; `seconds` is the time that took, without the engine's start.

    `incomplete` counts problems without an answer, `unjudged` those that were answered and could not be judged.
    """

    target: str
    version: int
    split: str
    problems: int
    samples: int
    temperature: float
    max_tokens: int
    seconds: float
    incomplete: int
    unjudged: int
    figures: AnswerFigures
    by_domain: Mapping[str, AnswerFigures]
    by_tag: Mapping[str, AnswerFigures]


def evaluate(target: Target, config: RunConfig, *, token: str | None, model: str, console: Console) -> EvaluationReport:
    """Ask, and work out the figures; progress goes to `console`.

    Raises:
        UserError: nothing was answered.
    """
    return run_until_interrupted(_evaluated(target, config, token=token, model=model, console=console))


def show(report: EvaluationReport, console: Console, *, as_json: bool) -> None:
    """Print the report: a table, or JSON."""
    if as_json:
        sys.stdout.write(json.dumps(msgspec.to_builtins(report), indent=2) + "\n")
        return
    console.print(_table(report))
    notes = [f"{report.samples} × {report.problems} samples in {report.seconds:.1f} s"]
    notes += [f"{report.incomplete} problems had no answer"] if report.incomplete else []
    notes += [f"{report.unjudged} could not be judged"] if report.unjudged else []
    console.print("; ".join(notes), highlight=False)


def held_out_orders(config: RunConfig, version: int) -> Iterator[PromptOrder]:
    """The questions of the recipe's evaluation, as the controller of its run asks them."""
    settings, problems = settings_of(config), held_out_problems(config)
    factory = PromptOrderFactory(
        seed=settings.seed,
        sampling=settings.sampling,
        by_domain=settings.by_domain,
        evaluation=settings.evaluation,
        training_problem=problems.problem,  # none is asked for, and a data set may have none
        held_out_problem=problems.problem,
    )
    return (factory.asking(index, version=version, number=0) for index in range(config.evaluation.problems))


async def _evaluated(
    target: Target, config: RunConfig, *, token: str | None, model: str, console: Console
) -> EvaluationReport:
    if not config.evaluation.problems:
        raise RecipeError("evaluation.problems is 0: there is nothing to ask; say --problems")
    orders = list(await asyncio.to_thread(lambda: list(held_out_orders(config, target.version))))
    answers: dict[int, EvaluationDone | None] = {}
    async with respondent(target, config, token=token, model=model) as answering:
        began = time.monotonic()
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("evaluating", total=len(orders))

            def note(order: PromptOrder, answer: EvaluationDone | None) -> None:
                answers[order.index] = answer
                progress.advance(bar)

            await ask(orders, answering, config, on_answer=note)
        seconds = time.monotonic() - began
    return _report(target, config, answers, seconds=seconds)


def _report(
    target: Target, config: RunConfig, answers: Mapping[int, EvaluationDone | None], *, seconds: float
) -> EvaluationReport:
    section = config.evaluation
    done = [answer for _, answer in sorted(answers.items()) if answer is not None]
    ks = sorted({*section.pass_at, *({section.samples} - {1})})
    seed = rng.key(rng.key(config.run.seed, "evaluation-interval"), target.version)
    figures = figures_of(done, pass_at=ks, seed=seed)
    return EvaluationReport(
        target=target.name,
        version=target.version,
        split=section.split,
        problems=section.problems,
        samples=section.samples,
        temperature=section.temperature,
        max_tokens=max(config.evaluation_max_tokens_of(domain) for domain in config.domains),
        seconds=seconds,
        incomplete=section.problems - len(done),
        unjudged=len(done) - figures.problems,
        figures=figures,
        by_domain=figures_by_domain(done, pass_at=ks, seed=seed),
        by_tag=figures_by_tag(done, pass_at=ks, seed=seed),
    )


def _table(report: EvaluationReport) -> Table:
    heads = [f"pass@{each.k}" for each in report.figures.pass_at]
    heads += [f"maj@{each.k}" for each in report.figures.majority_at]
    table = Table("", "problems", "accuracy", "95 %", *heads, "tokens", "P95", "truncated", title=report.target)
    _rows(table, report, {"all": report.figures})
    if len(report.by_domain) > 1:
        table.add_section()
        _rows(table, report, report.by_domain)
    if report.by_tag:
        table.add_section()
        _rows(table, report, report.by_tag)
    return table


def _rows(table: Table, report: EvaluationReport, groups: Mapping[str, AnswerFigures]) -> None:
    for name, figures in groups.items():
        chances = [*_at(report.figures.pass_at, figures.pass_at), *_at(report.figures.majority_at, figures.majority_at)]
        table.add_row(
            name,
            f"{figures.problems}",
            _share(figures.accuracy),
            _interval(figures),
            *chances,
            _number(figures.length_mean),
            _number(figures.length_p95),
            _share(figures.truncated),
        )


def _at(of_all: list[PassAt], found: list[PassAt]) -> list[str]:
    """The chances under the heads of the table."""
    by_k = {each.k: each for each in found}
    return [_share(by_k[each.k].value if each.k in by_k else None) for each in of_all]


def _interval(figures: AnswerFigures) -> str:
    return "–" if figures.low is None or figures.high is None else f"{figures.low:.1%}–{figures.high:.1%}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"
