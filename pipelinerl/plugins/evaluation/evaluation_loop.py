"""Evaluation loop: send problems to a respondent (engine or server) with bounded concurrency, and judge the answers.

| waits for | at most | who unblocks it |
|---|---|---|
| the samples of a problem | `actor.timeout_s` | the respondent; otherwise the problem fails with a reason |
| a verdict | the verifier's deadline | the verifier |

Guarantees: answers do not depend on the concurrency. Failed problems are counted. If the first `MOST_FAILURES` problems
all fail, the evaluation stops with the last reason. A signal stops the evaluation immediately, including requests in
flight.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, Final, Generic, TypeVar

import msgspec

from inference_contract.errors import ContractError
from inference_contract.schemas import FinishReason
from pipelinerl.actor.group_maker import GroupProgress
from pipelinerl.config.domains import DomainSection
from pipelinerl.config.recipe import RunConfig
from pipelinerl.engines.http.openai_client import TextAnswer
from pipelinerl.errors import PipelineError, UserError
from pipelinerl.messages import EvaluationDone
from pipelinerl.plugins.evaluation.respondents import Respondent
from pipelinerl.roles.verification import open_episodes, open_verifier
from pipelinerl.types import Outcome, PromptOrder, Verdict
from pipelinerl.verifiers.verdicts import judged
from pipelinerl.verifiers.verifier import SampledAnswer

#: If this many problems failed and none was answered, the respondent is assumed to be broken.
MOST_FAILURES: Final = 8
#: Exit status after a keyboard interrupt, as in shells.
INTERRUPTED: Final = 128 + signal.SIGINT

Result = TypeVar("Result")


async def ask(
    orders: Sequence[PromptOrder],
    respondent: Respondent,
    config: RunConfig,
    *,
    on_answer: Callable[[PromptOrder, EvaluationDone | None], None],
) -> None:
    """Send every prompt order (request for a group) to the respondent; pass each order and its answer to `on_answer`.

    The answer is None if the order failed. Raises `UserError` if all orders, or the first `MOST_FAILURES`, failed.
    """
    waiting, failures, answered = iter(orders), list[str](), 0

    async def work() -> None:
        nonlocal answered
        for order in waiting:
            try:
                samples, verdicts = await answer_to(order)
            except* (ContractError, PipelineError) as group:
                failures.append(str(_first(group)))
                answer = None
            else:
                answer, answered = answer_of(order, samples, verdicts), answered + 1
            if not answered and len(failures) >= MOST_FAILURES:
                raise UserError(f"{len(failures)} problems failed and none was answered; the last: {failures[-1]}")
            on_answer(order, answer)

    try:
        async with _answering(config, respondent) as answer_to, asyncio.TaskGroup() as group:
            samples = max((order.sampling.num_samples for order in orders), default=1)
            # As many problems at a time as an actor would have, within the engine's queue.
            for _ in range(max(1, min(config.groups_in_flight, config.engine.max_waiting // samples))):
                group.create_task(work())
    # Do not use `except*` here: before Python 3.11.4, it wraps the errors raised inside it in a group.
    except ExceptionGroup as several:
        refusals, others = several.split(UserError)
        if refusals is None or others is not None:
            raise
        raise _first(refusals) from None
    if failures and not answered:
        raise UserError(f"no problem was answered; the last failed with: {failures[-1]}")


def answer_of(order: PromptOrder, samples: list[TextAnswer], verdicts: list[Verdict]) -> EvaluationDone:
    """Summarize the samples of one problem as actors report them; `lengths` is empty if one is unknown."""
    lengths = [sample.num_tokens for sample in samples if sample.num_tokens is not None]
    outcomes = [verdict.outcome for verdict in verdicts]
    return EvaluationDone(
        order_id=order.order_id,
        index=order.index,
        correct=sum(outcome is Outcome.CORRECT for outcome in outcomes),
        judged=sum(outcome.is_judgement for outcome in outcomes),
        oldest_version=0,
        newest_version=0,
        num_tokens=sum(lengths),
        domain=order.problem.domain,
        tags=list(order.problem.tags),
        truncated=sum(sample.finish_reason == FinishReason.LENGTH for sample in samples),
        lengths=lengths if len(lengths) == len(samples) else [],
        answers=[verdict.answer for verdict in verdicts],
        right=[outcome is Outcome.CORRECT for outcome in outcomes],
        unjudged=[place for place, outcome in enumerate(outcomes) if not outcome.is_judgement],
    )


def digest_of_domains(domains: Iterable[DomainSection]) -> str:
    """Return a digest of all domain settings on which answers depend; an `AnswerLog` stores it."""
    settings = [domain.model_dump(mode="json", exclude={"group_size"}) for domain in domains]
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


def run_until_interrupted(work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`; SIGINT and SIGTERM cancel it cleanly and raise `SystemExit`."""

    async def guarded() -> Result:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        return await task

    try:  # use asyncio's event loop: uvloop forks to start verifiers, which is unsafe with the JAX engine
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        raise SystemExit(INTERRUPTED) from None


#: Function that returns an order's samples and their verdicts; raises `ContractError` or `PipelineError`.
_AnswerTo = Callable[[PromptOrder], Awaitable[tuple[list[TextAnswer], list[Verdict]]]]


@asynccontextmanager
async def _answering(config: RunConfig, respondent: Respondent) -> AsyncIterator[_AnswerTo]:
    """Yield a function that takes a prompt order and returns its answers with their verdicts.

    The domain's verifier judges single answers, its environment judges episodes. The verifiers and environments of all
    domains are closed at the end of the block.
    """
    verifiers = {domain.name: open_verifier(domain) for domain in config.domains if domain.has_verifier}
    played, sampler = [domain.name for domain in config.domains if domain.has_environment], respondent.sampler
    if played and sampler is None:
        raise UserError(
            f"domains.{played[0]} has an environment, whose episodes need an engine that returns "
            "tokens; name a model directory, a run, or an engine of pipelinerl"
        )
    episodes = open_episodes(config, sampler, verifiers) if sampler else None

    async def answer(order: PromptOrder) -> tuple[list[TextAnswer], list[Verdict]]:
        if episodes is not None and order.problem.domain in played:
            made = await episodes.make(order, GroupProgress())
            texts = [
                TextAnswer(each.text, each.rollout.finish_reason, each.rollout.num_sampled_tokens) for each in made
            ]
            return texts, [each.rollout.verdict for each in made]
        samples = await respondent.samples(order)
        answers = [SampledAnswer(sample.text, finish_reason=sample.finish_reason) for sample in samples]
        judgements = await judged(verifiers[order.problem.domain], order.problem, answers)
        return samples, [judgement.verdict for judgement in judgements]

    try:
        async with episodes.serve() if episodes else nullcontext():
            yield answer
    finally:
        if episodes is not None:
            await episodes.close()
        for verifier in verifiers.values():
            await verifier.close()


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


Answer = TypeVar("Answer", bound=msgspec.Struct)


class AnswerLog(Generic[Answer]):
    """A file of results from which an interrupted command resumes.

    Its first line is the question: a JSON object with every setting on which the results depend. Each further line is
    the result of one problem; complete lines survive a crash of the process, and a partly written last line is ignored.
    A file with results of another question is refused, and so is a file that another process writes. `answers` are all
    results: those read from the file, and those added since.
    """

    def __init__(self, file: BinaryIO, answers: list[Answer]) -> None:
        self._file = file
        self.answers = answers
        """In order of arrival."""

    def add(self, answer: Answer) -> None:
        """Write a result to the file, then add it to `answers`."""
        self._file.write(msgspec.json.encode(answer) + b"\n")
        self._file.flush()
        self.answers.append(answer)


@contextmanager
def answer_log(path: Path, question: Mapping[str, Any], of: type[Answer]) -> Iterator[AnswerLog[Answer]]:
    """Open the log in the file `path` for the duration of the block, creating it if missing.

    Raises:
        UserError: the file holds results of other settings (`question`), is damaged, or cannot be written or locked.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; name another --out") from None
    with os.fdopen(descriptor, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another process writes {path}; wait for its end, or name another --out") from None
        yield AnswerLog(file, _read(file, path, dict(question), of))


def _read(file: BinaryIO, path: Path, question: dict[str, Any], of: type[Answer]) -> list[Answer]:
    """Return the results in the file. Write `question` into a new file; cut off a partly written last line."""
    data, first = file.read(), json.dumps(question).encode() + b"\n"
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    if not lines and first.startswith(data):  # a new file, or one whose writer was killed during the first line
        file.write(first[len(data) :])
        file.flush()
        return []
    try:
        logged = json.loads(lines[0])
    except (ValueError, IndexError):
        logged = None
    if logged != question:
        known = logged if isinstance(logged, dict) else {}
        other = [name for name in {**question, **known} if name not in known or known[name] != question.get(name)]
        raise UserError(
            f"{path} holds answers to another question (another {', '.join(other)}); name another --out, or remove it"
        )
    file.truncate(data.rfind(b"\n") + 1)  # drop a partly written line; its problem is evaluated again
    try:
        return [msgspec.json.decode(line, type=of) for line in lines[1:]]
    except msgspec.DecodeError as error:
        raise UserError(f"{path} is damaged: {error}; remove it, or name another --out") from None
