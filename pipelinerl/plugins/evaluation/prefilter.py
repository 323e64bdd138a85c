"""`pipelinerl prefilter`: a model's pass rate on each training problem, and a data set of the useful problems.

    out/answers.jsonl    one line per answered problem; the command resumes from it
    out/<domain>.jsonl   the data set: problems whose pass rate is within the band to keep

Each line of a data set holds `messages`, `answer`, `metadata` (the problem's own, and `pass_rate`) and `tags` (the
problem's own, and one for its pass rate). Guarantees: a repeated call with the same settings evaluates only unanswered
problems. A call with other settings is refused. The data set is written atomically.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.progress import Progress

from pipelinerl import rng
from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import UserError
from pipelinerl.messages import EvaluationDone
from pipelinerl.plugins.evaluation.evaluation_loop import answer_log, ask, digest_of_domains, run_until_interrupted
from pipelinerl.plugins.evaluation.respondents import Target, respondent
from pipelinerl.roles.problems import training_problems
from pipelinerl.types import Problem, PromptOrder, Purpose

#: File name of the log of answers.
ANSWERS: Final = "answers.jsonl"
#: Number of equally wide bands of pass rates; each data set row is tagged with its band.
_BANDS: Final = 5
#: A problem source counts as exhausted after this many duplicates in a row, plus one per distinct problem so far.
_REPETITIONS: Final = 100


class PassRate(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one problem: the number of samples with a verdict, and the number of correct samples."""

    problem_id: str
    judged: int
    correct: int

    @property
    def value(self) -> float:
        """The share of correct samples; 0 if no sample has a verdict."""
        return self.correct / self.judged if self.judged else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The band of pass rates to keep, including both ends."""

    low: float = 0.0
    high: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Band:
        """Parse a band such as `0.1..0.9`; raise `UserError` if it is not a band within 0 and 1."""
        low, separator, high = text.partition("..")
        try:
            band = cls(low=float(low), high=float(high))
        except ValueError:
            separator, band = "", cls()
        if not separator or not 0 <= band.low <= band.high <= 1:
            raise UserError(f"--keep must be a band of pass rates such as 0.1..0.9, got {text!r}")
        return band

    def keeps(self, rate: PassRate) -> bool:
        """Return True if the problem belongs in the data set; a problem without any verdict does not."""
        return rate.judged > 0 and self.low <= rate.value <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefilterReport:
    """Numbers of problems: all, `asked` in this call, `unanswered`; the mean pass rate, and the files by domain."""

    problems: int
    asked: int
    unanswered: int
    kept: Mapping[str, int]
    mean: float
    files: Mapping[str, Path]


def prefilter(
    target: Target,
    config: RunConfig,
    *,
    out: Path,
    keep: Band,
    problems: int,
    samples: int,
    token: str | None,
    model: str,
    console: Console,
) -> PrefilterReport:
    """Evaluate the unanswered problems and write the data set; progress goes to `console`.

    Raises:
        UserError: the results in `out` were made with other settings, or no problem was answered.
    """
    chosen = list(_distinct(config, problems))
    with answer_log(out / ANSWERS, _question(target, config, samples=samples, model=model), PassRate) as log:
        known = {rate.problem_id: rate for rate in log.answers}
        missing = [(index, problem) for index, problem in enumerate(chosen) if problem.problem_id not in known]
        orders = [_order(config, index, problem, samples=samples) for index, problem in missing]

        async def evaluate() -> None:
            with Progress(console=console, transient=True) as progress:
                bar = progress.add_task("prefiltering", total=len(orders))

                def note(order: PromptOrder, answer: EvaluationDone | None) -> None:
                    progress.advance(bar)
                    if answer is not None:
                        problem_id = order.problem.problem_id
                        known[problem_id] = PassRate(
                            problem_id=problem_id, judged=answer.judged, correct=answer.correct
                        )
                        log.add(known[problem_id])

                async with respondent(target, config, token=token, model=model) as answering:
                    await ask(orders, answering, config, on_answer=note)

        if orders:
            run_until_interrupted(evaluate())
    rates = {problem.problem_id: known[problem.problem_id] for problem in chosen if problem.problem_id in known}
    kept = [problem for problem in chosen if problem.problem_id in rates and keep.keeps(rates[problem.problem_id])]
    judged = [rate.value for rate in rates.values() if rate.judged]
    return PrefilterReport(
        problems=len(chosen),
        asked=len(orders),
        unanswered=len(chosen) - len(rates),
        kept={domain.name: sum(each.domain == domain.name for each in kept) for domain in config.trained_domains},
        mean=sum(judged) / len(judged) if judged else 0.0,
        files={domain.name: _write(out, domain.name, kept, rates) for domain in config.trained_domains},
    )


def _distinct(config: RunConfig, most: int) -> Iterator[Problem]:
    """Yield up to `most` distinct training problems in the run's order; stop if the source only repeats itself."""
    mixture, seen, repeated, index = training_problems(config), set[str](), 0, 0
    while len(seen) < most and repeated < len(seen) + _REPETITIONS:
        problem = mixture.problem(index)
        index += 1
        if problem.problem_id in seen:
            repeated += 1
            continue
        repeated = 0
        seen.add(problem.problem_id)
        yield problem


def _order(config: RunConfig, index: int, problem: Problem, *, samples: int) -> PromptOrder:
    own = next(domain.sampling for domain in config.domains if domain.name == problem.domain)
    sampling = replace(
        config.sampling.of_an_order,
        num_samples=samples,
        temperature=config.sampling.temperature if own.temperature is None else own.temperature,
        max_tokens=own.max_tokens or config.sampling.max_tokens,
        stop=config.sampling.stop if own.stop is None else own.stop,
    )
    return PromptOrder(
        order_id=f"prefilter-{index:06d}",
        index=index,
        purpose=Purpose.EVALUATION,
        problem=problem,
        sampling=sampling,
        seed=rng.key(config.run.seed, "prefilter", problem.problem_id),
        chat_template_kwargs=own.chat_template_kwargs,
    )


def _question(target: Target, config: RunConfig, *, samples: int, model: str) -> dict[str, Any]:
    """Return the settings on which pass rates depend; an `AnswerLog` refuses results made with other settings."""
    return {
        "target": target.named(model),
        "sampling": config.sampling.model_dump(mode="json", exclude={"group_size"}),
        "samples": samples,
        "seed": config.run.seed,
        "domains": digest_of_domains(config.domains),
        "weights": target.fingerprint,
    }


def _write(out: Path, domain: str, kept: list[Problem], rates: Mapping[str, PassRate]) -> Path:
    path = out / f"{domain}.jsonl"
    temporary = path.with_suffix(".writing")
    with temporary.open("w") as lines:
        for problem in (each for each in kept if each.domain == domain):
            rate = rates[problem.problem_id]
            row = {
                "id": problem.problem_id.removeprefix(f"{problem.domain}:"),
                "messages": [{"role": message.role, "content": message.content} for message in problem.messages],
                "answer": problem.ground_truth,
                "metadata": {**problem.metadata, "pass_rate": rate.value, "pass_rate_samples": rate.judged},
                "tags": [*problem.tags, f"pass_rate={band_of(rate.value)}"],
            }
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
    temporary.replace(path)
    return path


def band_of(rate: float) -> str:
    """Return the tag of a pass rate: `0`, `0-0.2` … `0.8-1`, `1`. Problems at 0 and at 1 carry no training signal."""
    if rate in (0.0, 1.0):
        return f"{rate:g}"
    number = min(int(rate * _BANDS), _BANDS - 1)
    return f"{number / _BANDS:g}-{(number + 1) / _BANDS:g}"
