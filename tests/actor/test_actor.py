"""Tests of the actor's loop on a stream in memory, with a scripted sampler: each requested group ends exactly once."""

import asyncio
import contextlib
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import final

import msgspec
import numpy as np
import pytest

from inference_contract.errors import ContextExceeded, InvalidRequest
from inference_contract.schemas import AssistantMessage, ChatCompletion, Choice, Usage
from pipelinerl.actor.actor import Actor, ActorSettings, StageLog, VerifierTally
from pipelinerl.actor.group_maker import GroupProgress
from pipelinerl.actor.single_turn import SingleTurn
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.engines.http.pool import EnginePool
from pipelinerl.engines.http.server import create_app
from pipelinerl.errors import AddressError, DeadlineError
from pipelinerl.messages import (
    ACTORS_GROUP,
    PROMPTS,
    REPORTS,
    ROLLOUTS,
    ActorAlive,
    EvaluationDone,
    GroupFailed,
    GroupHandedOver,
    GroupOutdated,
    VerifierFigures,
    decode_report,
)
from pipelinerl.streams.memory_stream import MemoryStream
from pipelinerl.streams.records import decode_group, encode_order
from pipelinerl.streams.stream import DEAD_LETTERS, START
from pipelinerl.types import Answered, Message, Outcome, Priority, Problem, PromptOrder, Purpose, Sampling, Verdict
from pipelinerl.verifiers.group_filter import GroupFilter
from pipelinerl.verifiers.verifier import Judgement, PerAnswerVerifier, correct, failed, timed_out, wrong
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.served import in_thread
from tests.patience import PATIENCE_S

NAME = "actor-0"
PARTITION = ROLLOUTS + NAME
DEADLINE_S = PATIENCE_S


def order(index, *, purpose=Purpose.TRAINING, samples=2):
    problem = Problem(
        problem_id=str(index), domain="d", messages=(Message("user", f"say {index}"),), ground_truth=f"{index}"
    )
    return PromptOrder(
        order_id=f"{'prompt' if purpose is Purpose.TRAINING else 'eval-3'}-{index:06d}",
        index=index,
        purpose=purpose,
        problem=problem,
        sampling=Sampling(num_samples=samples, temperature=0.5, max_tokens=4, stop=("!",)),
        seed=1000 * index,
    )


def completion(*texts, finish="stop", **changes):
    """Return a completion with one choice per text. Each has three tokens: two of model version 4, one of version 5."""
    fields = {"token_ids": [7, 8, 9], "token_logprobs": [-0.5, -0.25, -1.0], "version_spans": [(4, 2), (5, 1)]}
    choices = [
        Choice(index=i, message=AssistantMessage(content=text), finish_reason=finish, **(fields | changes))
        for i, text in enumerate(texts)
    ]
    usage = Usage(prompt_tokens=2, completion_tokens=3 * len(texts), total_tokens=2 + 3 * len(texts))
    return ChatCompletion(
        id="c", created=0, model="m", choices=choices, usage=usage, prompt_token_ids=[1, 2], model_version=4, epoch=6
    )


def answers(request):
    """Return samples for the request: the first sample is correct, and all others are wrong."""
    assert request.messages is not None
    right = request.messages[0].content.removeprefix("say ")
    return completion(right, *["wrong"] * (request.n - 1))


@final
class ScriptedSampler:
    """Sampler with scripted answers; satisfies `Sampler`. It withholds answers while `gate` is closed."""

    def __init__(self, script=answers):
        self.script = script
        self.requests = []
        self.handed_over = (0, 0)
        self.gate = asyncio.Event()
        self.gate.set()

    async def complete(self, request, *, begun=lambda: None, engine="", near=""):
        self.requests.append(request)
        self.again = begun
        begun()
        await self.gate.wait()
        answer = self.script(request)
        if isinstance(answer, Exception):
            raise answer
        return Answered(answer, "http://engine", *self.handed_over)


@final
class Exact:
    """Verifier that accepts only the exact ground truth. For the answer `?` it returns an error, not a verdict."""

    async def verify(self, problem, completion_text):
        if completion_text == "?":
            return failed("no idea")
        right = completion_text == problem.ground_truth
        return Verdict(outcome=Outcome.CORRECT if right else Outcome.WRONG, reward=float(right))


def exact(_):
    return PerAnswerVerifier(Exact())


@final
class Watched:
    """A stream in memory, with methods that append prompt orders and read the groups and reports of the actor."""

    def __init__(self):
        self.stream = MemoryStream()

    async def order(self, *orders):
        await self.stream.append(PROMPTS, [o if isinstance(o, bytes) else encode_order(o) for o in orders])

    async def groups(self):
        entries = await self.stream.read({PARTITION: START}, count=1000, block_s=0)
        return [decode_group(entry.payload) for entry in entries]

    async def reports(self, kind):
        entries = await self.stream.read({REPORTS: START}, count=1000, block_s=0)
        decoded = [decode_report(entry.payload) for entry in entries]
        return [report for report in decoded if isinstance(report, kind)]

    async def unacknowledged(self):
        return len(self.stream._pending(PROMPTS, ACTORS_GROUP))


@final
class FullServer:
    """Stream that rejects appended rollouts, as if its server had no memory left; `behind` handles all other calls."""

    def __init__(self, behind):
        self._behind = behind

    def __getattr__(self, name):
        return getattr(self._behind, name)

    async def append(self, stream, payloads, *, first_id=None):
        if stream == PARTITION:
            raise AddressError("out of memory")
        return await self._behind.append(stream, payloads, first_id=first_id)


@asynccontextmanager
async def working(watched, sampler=None, *, maker=None, in_flight=4, stream=None, group_filter=None):
    """Run an actor whose groups come from `maker`, by default in single turns from `sampler`; yield it and its task."""
    actor = Actor(
        ActorSettings(name=NAME, groups_in_flight=in_flight, heartbeat_s=0.02, block_s=0.02, reclaim_idle_s=5.0),
        stream=stream or watched.stream,
        maker_of=lambda _: maker or SingleTurn(sampler, exact, attempts=3),
        group_filter=group_filter,
    )
    task = asyncio.create_task(actor.run(), name="actor")
    try:
        yield actor, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(happened):
    """Poll the coroutine function `happened` until its result is true; return the result."""
    async with asyncio.timeout(DEADLINE_S):
        while not (result := await happened()):
            await asyncio.sleep(0.005)
    return result


async def test_actor_answers_a_prompt_order_with_a_verified_rollout_group():
    watched, sampler = Watched(), ScriptedSampler()
    async with working(watched, sampler):
        await watched.order(order(7))
        (group,) = await until(watched.groups)
    assert (group.group_id, group.index, group.domain, group.actor) == ("prompt-000007", 7, "d", NAME)
    assert [rollout.verdict.reward for rollout in group.rollouts] == [1.0, 0.0]
    rollout = group.rollouts[0]
    assert (rollout.finish_reason, rollout.temperature, rollout.epoch) == ("stop", 0.5, 6)
    (turn,) = rollout.turns
    assert (turn.context_token_ids.tolist(), turn.token_ids.tolist()) == ([1, 2], [7, 8, 9])
    assert (turn.behavior_logprobs.tolist(), turn.spans) == ([-0.5, -0.25, -1.0], ((4, 2), (5, 1)))
    (request,) = sampler.requests
    assert (request.n, request.temperature, request.max_tokens, request.stop, request.seed) == (2, 0.5, 4, ["!"], 7000)
    assert request.return_token_ids


async def test_group_too_old_for_the_next_step_is_dropped():
    """With staleness bound k = 2, a group begun at version 3 is too old at version 5; one restarted at 5 stays."""
    watched, sampler = Watched(), ScriptedSampler()
    sampler.gate.clear()

    async def has_requested(number):
        return len(sampler.requests) == number

    async with working(watched, sampler) as (actor, _):
        await watched.order(order(1), order(2, purpose=Purpose.EVALUATION))
        await until(lambda: has_requested(2))
        actor.follow(model_version=3, k=2)
        await watched.order(order(3))
        await until(lambda: has_requested(3))
        again = sampler.again
        for version in (4, 4, 5):
            actor.follow(model_version=version, k=2)
        (report,) = await until(lambda: watched.reports(GroupOutdated))
        assert report == GroupOutdated(
            order_id="prompt-000001", index=1, oldest=3, current=5, domain="d", issued_at=(0, 0)
        )
        again()  # order 3 begins again on another engine
        actor.follow(model_version=6, k=2)
        sampler.gate.set()
        (group,) = await until(watched.groups)
        await until(lambda: watched.reports(EvaluationDone))
        await until(lambda: none_of(watched.unacknowledged()))
    assert group.index == 3 and len(await watched.reports(GroupOutdated)) == 1


async def test_dropped_group_frees_its_engine_slots_immediately():
    """The engine needs 60 s for a token, so its slots become free in time only if the actor disconnects."""
    watched, engine = Watched(), ScriptedEngine(step_s=60.0)
    with in_thread(create_app(engine, token=None)) as url:
        async with EngineClient() as client, working(watched, EnginePool(client, [url])) as (actor, _):
            await watched.order(order(1))

            async def is_busy():
                return engine._running > 0

            await until(is_busy)
            for version in (0, 1):
                actor.follow(model_version=version, k=1)
            await until(lambda: watched.reports(GroupOutdated))
            await until(lambda: none_of(is_busy()))
            await until(lambda: none_of(watched.unacknowledged()))
    assert not await watched.groups()


async def test_prompt_order_is_acknowledged_only_after_its_rollout_group_is_appended():
    """If the append fails, the order stays assigned to this actor, which repeats it after a restart."""

    watched = Watched()
    await watched.order(order(1), order(2, purpose=Purpose.EVALUATION))
    async with working(watched, ScriptedSampler(), stream=FullServer(watched.stream)) as (_, task):
        with pytest.raises(ExceptionGroup, match="unhandled errors"):
            await asyncio.wait_for(task, DEADLINE_S)
    assert await watched.unacknowledged() >= 1
    async with working(watched, ScriptedSampler()):
        assert [group.index for group in await until(watched.groups)] == [1]
        assert await until(lambda: none_of(watched.unacknowledged()))


async def none_of(count):
    return await count == 0


async def test_only_aborted_samples_are_sampled_again():
    """The request for the missing samples has another seed than the first request."""

    def script(request):
        if request.n == 3:
            aborted = completion("cut", "cut", finish="abort")
            return aborted.model_copy(update={"choices": [*completion("7").choices, *aborted.choices]})
        return completion("7", "again")

    watched, sampler = Watched(), ScriptedSampler(script)
    async with working(watched, sampler):
        await watched.order(order(7, samples=3))
        (group,) = await until(watched.groups)
        assert await until(lambda: _reported(watched, lambda alive: alive.retries == 2))
    assert [rollout.verdict.reward for rollout in group.rollouts] == [1.0, 1.0, 0.0]
    assert [request.n for request in sampler.requests] == [3, 2]
    assert len({request.seed for request in sampler.requests}) == 2


@pytest.mark.parametrize("tokens", [(40, 3), (0, 0)], ids=["moved", "stayed"])
async def test_actor_reports_the_tokens_kept_and_resampled_when_an_answer_moved_to_another_engine(tokens):
    watched, sampler = Watched(), ScriptedSampler()
    sampler.handed_over = tokens
    async with working(watched, sampler):
        await watched.order(order(7))
        await until(watched.groups)
        assert await until(lambda: _reported(watched, lambda alive: alive.groups_done == 1))
    reports = [(each.index, each.tokens_kept, each.tokens_resampled) for each in await watched.reports(GroupHandedOver)]
    assert reports == ([(7, 40, 3)] if any(tokens) else [])


async def _reported(watched, right):
    return any(right(alive) for alive in await watched.reports(ActorAlive))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (lambda _: completion("x", "y", finish="abort"), "aborted its samples in each of 3 attempts"),
        (lambda _: DeadlineError("no engine completed the request within 5 s"), "no engine completed"),
        (lambda _: InvalidRequest("no template"), "problem 7: no template"),
        (lambda _: ContextExceeded("the prompt must leave room for a token"), "must leave room"),
        (lambda _: completion("x", "y", token_ids=None), "run `pipelinerl conformance engine URL` against it"),
        (lambda _: completion("x", "y", version_spans=None), "run `pipelinerl conformance engine URL` against it"),
        (lambda _: completion("x", "y", version_spans=[(4, 2)]), "3 tokens, 3 log-probs and spans over 2"),
        (lambda _: completion("x", "y", token_logprobs=[-1.0]), "3 tokens, 1 log-probs and spans over 3"),
        (lambda _: completion("x", "y", token_ids=[], token_logprobs=[], version_spans=[]), "0 tokens"),
        (lambda _: completion("x", "y").model_copy(update={"prompt_token_ids": []}), "0 prompt tokens"),
    ],
)
async def test_engine_error_fails_only_the_requested_group_that_caused_it_and_later_groups_succeed(script, reason):
    watched, sampler = Watched(), ScriptedSampler(script)
    async with working(watched, sampler):
        await watched.order(order(7))
        (report,) = await until(lambda: watched.reports(GroupFailed))
        assert (report.order_id, report.index, report.purpose) == ("prompt-000007", 7, "training")
        assert reason in report.reason
        assert (report.code == ContextExceeded.code) is ("leave room" in reason)
        sampler.script = answers
        await watched.order(order(8))
        assert [group.index for group in await until(watched.groups)] == [8]
        assert await until(lambda: none_of(watched.unacknowledged()))


class OwnError(BaseException):
    """An exception of user code that is no `Exception`."""


class Unreadable(Exception):
    def __str__(self):
        raise RuntimeError("no message")


@final
class Raising:
    """A group maker that raises what its table says for the order's index; it makes all other groups."""

    def __init__(self, errors):
        self._errors = errors
        self._maker = SingleTurn(ScriptedSampler(), exact, attempts=1)

    async def make(self, order, progress):
        if (error := self._errors.get(order.index)) is not None:
            raise error
        return await self._maker.make(order, progress)


async def test_exception_of_a_maker_fails_its_order_once_and_the_actor_works_on():
    errors = [RuntimeError("broken" * 10**6), SystemExit(3), OwnError("own"), asyncio.CancelledError(), Unreadable()]
    watched, maker = Watched(), Raising(dict(enumerate(errors)))
    async with working(watched, maker=maker, in_flight=2) as (_, task):
        await watched.order(*map(order, range(len(errors) + 1)))
        await until(watched.groups)
        await until(lambda: none_of(watched.unacknowledged()))
        assert not task.done()
    reports = await watched.reports(GroupFailed)
    assert [each.index for each in reports] == [0, 1, 2, 3, 4]
    expected = [
        "RuntimeError: brokenbroken",
        "SystemExit: 3",
        "OwnError: own",
        "CancelledError",
        "Unreadable: <exception str",
    ]
    assert all(text in each.reason for text, each in zip(expected, reports, strict=True))
    assert len(await watched.stream.read({DEAD_LETTERS: START}, count=10, block_s=0)) == len(errors)


@final
class BadVerifier:
    """A `GroupVerifier` whose verdicts have fields of wrong types; it raises for the answer `?`."""

    async def judge(self, problem, answers):
        if problem.ground_truth == "0":
            raise OverflowError("too large")
        reward = np.float32(0.5) if problem.ground_truth == "1" else 10**400
        return [Judgement(Verdict(outcome="partial", reward=reward, reason=None), 0)] * len(answers)

    async def close(self): ...


@final
class Process:
    """A stream and a group maker of an actor's process, which dies when the deadly order runs: it stops answering."""

    def __init__(self, watched, *, deadly):
        self.died = asyncio.Event()
        self.begun = []
        self._watched, self._deadly = watched, deadly
        self._maker = SingleTurn(ScriptedSampler(), exact, attempts=1)

    def __getattr__(self, name):
        if self.died.is_set():
            raise AddressError("this process is dead")
        return getattr(self._watched.stream, name)

    async def make(self, order, progress):
        self.begun.append(order.index)
        if order.index == self._deadly:
            self.died.set()
        await asyncio.sleep(0.01)
        return await self._maker.make(order, progress)

    async def run(self, *, groups):
        """Run an actor until it dies, or until there are `groups` groups and no order is left."""

        async def is_over():
            done = await appended(self._watched, groups) and await none_of(self._watched.unacknowledged())
            return done or self.died.is_set()

        async with working(self._watched, maker=self, stream=self):
            await until(is_over)


async def test_order_that_three_processes_did_not_survive_fails_and_the_orders_beside_it_succeed():
    watched = Watched()
    await watched.order(*map(order, range(1, 5)))
    begun = []
    for death in range(4):
        process = Process(watched, deadly=2)
        await process.run(groups=3)
        assert process.died.is_set() is (death < 3)
        begun.append(process.begun)
    assert begun == [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2], [3, 4]], "after two deaths, each order runs alone"
    (report,) = await watched.reports(GroupFailed)
    assert report.index == 2 and report.reason.startswith(
        "problem 2: order prompt-000002 of domain d was in work when the actor's process died, 3 times"
    )
    assert sorted(group.index for group in await watched.groups()) == [1, 3, 4]
    await watched.order(replace(order(2), order_id="prompt-000009", index=9), order(5))
    process = Process(watched, deadly=2)
    await process.run(groups=4)
    assert process.begun == [5], "the problem that killed actors is not tried again"
    assert [each.index for each in await watched.reports(GroupFailed)] == [2, 9]
    assert len(await watched.stream.read({DEAD_LETTERS: START}, count=10, block_s=0)) == 1
    assert await _reported(watched, lambda alive: alive.verifiers.get("d", VerifierFigures()).errors == 1)


async def test_orders_of_actors_that_were_stopped_and_not_killed_are_never_given_up():
    watched, sampler = Watched(), ScriptedSampler()
    sampler.gate.clear()
    await watched.order(order(1), order(2))

    async def both_begun():
        return len(sampler.requests) == 2

    for _ in range(5):
        async with working(watched, sampler):
            assert await until(both_begun)
        sampler.requests.clear()
    sampler.gate.set()
    async with working(watched, sampler):
        assert await until(lambda: none_of(watched.unacknowledged()))
    assert sorted(group.index for group in await watched.groups()) == [1, 2]


async def appended(watched, count):
    return len(await watched.groups()) == count


async def test_bad_verdicts_and_errors_of_a_verifier_mask_answers_and_reach_the_trainer():
    watched = Watched()
    maker = SingleTurn(ScriptedSampler(), lambda _: BadVerifier(), attempts=1)
    async with working(watched, maker=maker):
        await watched.order(*map(order, range(3)))
        await until(lambda: appended(watched, 3))
    verdicts = {group.index: group.rollouts[0].verdict for group in await watched.groups()}
    assert [verdicts[index].outcome for index in range(3)] == [
        Outcome.VERIFIER_ERROR,
        Outcome.PARTIAL,
        Outcome.VERIFIER_ERROR,
    ]
    assert verdicts[1].reward == 0.5 and "BadVerifier failed: " in verdicts[0].reason
    assert "reward of a Verdict must be a finite number" in verdicts[2].reason and "bits" in verdicts[2].reason


@pytest.mark.parametrize("record", [b"", b"nonsense", encode_order(order(1))[:-1]])
async def test_undecodable_prompt_order_is_moved_to_the_dead_letter_stream(record):
    watched = Watched()
    async with working(watched, ScriptedSampler()):
        await watched.order(record, order(8))
        assert [group.index for group in await until(watched.groups)] == [8]
        assert await until(lambda: none_of(watched.unacknowledged()))
    assert await watched.stream.length(DEAD_LETTERS) == 1


@pytest.mark.parametrize(("text", "correct", "judged"), [("7", 1, 3), ("no", 0, 3), ("?", 0, 2)])
async def test_evaluation_result_is_reported_to_the_controller_and_not_appended_to_the_rollouts(text, correct, judged):
    watched, sampler = Watched(), ScriptedSampler(lambda _: completion(text, "no", "no"))
    async with working(watched, sampler):
        await watched.order(order(7, purpose=Purpose.EVALUATION, samples=3))
        (report,) = await until(lambda: watched.reports(EvaluationDone))
    assert [request.priority for request in sampler.requests] == [Priority.EVALUATION], "training waits behind it"
    assert report.shown is not None and report.shown.prompt == "user: say 7" and report.shown.ground_truth == "7"
    assert [answer.text for answer in report.shown.answers] == [text, "no", "no"]
    assert (report.shown.answers[0].num_tokens, report.shown.answers[0].spans) == (3, [(4, 2), (5, 1)])
    assert msgspec.structs.replace(report, shown=None) == EvaluationDone(
        order_id="eval-3-000007",
        index=7,
        correct=correct,
        judged=judged,
        oldest_version=4,
        newest_version=5,
        num_tokens=9,
        epoch=6,
        domain="d",
        lengths=[3, 3, 3],
        answers=["", "", ""],
        right=[text == "7", False, False],
        unjudged=[0] if text == "?" else [],
    )
    assert await watched.groups() == []


async def test_actor_works_on_no_more_prompt_orders_at_a_time_than_its_limit():
    """A raised limit takes effect at once, and a lowered one as groups end."""
    in_work = []  # when each request is answered, itself included

    def script(request):
        in_work.append(len(sampler.requests) - len(in_work))
        return answers(request)

    watched, sampler = Watched(), ScriptedSampler(script)
    sampler.gate.clear()
    await watched.order(*map(order, range(10)))
    async with working(watched, sampler, in_flight=3) as (actor, _):
        for limit in (3, 4):
            actor.resize(limit)
            await until(lambda limit=limit: _reported(watched, lambda alive: alive.groups_in_flight == limit))
        await asyncio.sleep(0.1)
        assert (len(sampler.requests), await watched.unacknowledged()) == (4, 4)
        actor.resize(1)
        sampler.gate.set()
        await until(lambda: none_of(watched.unacknowledged()))
    assert in_work == [4, 3, 2] + 7 * [1]
    assert sorted(group.index for group in await watched.groups()) == list(range(10))


async def test_group_rejected_by_the_curation_filter_is_appended_with_the_reason_and_counted(tmp_path):
    """The filter judges neither evaluation answers nor groups whose verifier returned an error."""
    file = tmp_path / "mine.py"
    file.write_text("def keep(answer, correct):\n    return any(correct) or f'none of {len(correct)} for {answer}'\n")
    group_filter = GroupFilter(f"{file}:keep", deadline_s=PATIENCE_S, workers=1)
    watched, texts = Watched(), {"say 7": ("7", "no"), "say 8": ("?", "?")}
    sampler = ScriptedSampler(lambda request: completion(*texts.get(request.messages[0].content, ("a", "b"))))

    async def all_there():
        return len(await watched.groups()) == 3 and bool(await watched.reports(EvaluationDone))

    async with working(watched, sampler, group_filter=group_filter):
        await watched.order(order(7), order(8), order(9), order(3, purpose=Purpose.EVALUATION))
        await until(all_there)
        assert await until(lambda: _reported(watched, lambda alive: alive.filtering.judged == 2))
    assert {group.index: group.refusal for group in await watched.groups()} == {7: "", 8: "", 9: "none of 2 for 9"}
    await group_filter.close()


def trace(log, traced, *spans):
    with log.claimed(traced):
        log.verified(traced, GroupProgress(engine="http://a", sampled_at=1.5, spans=spans or [[(0, 1)]]))


def test_stage_log_times_a_quarter_of_the_training_groups_chosen_by_seed():
    ticks = count(1)
    log = StageLog(clock=lambda: float(next(ticks)))
    trace(log, replace(order(7), seed=4), [(0, 1)], [(0, 2), (1, 3)])
    (stages,) = log.take()
    assert (stages.index, stages.claimed, stages.sampled, stages.verified) == (7, 1.0, 1.5, 2.0)
    assert (stages.engine, stages.spans) == ("http://a", [(0, 2), (1, 3)]), "spans of the longest answer"
    drawn = []
    for seed in range(16):
        trace(log, replace(order(seed), seed=seed))
        drawn += [stages.index for stages in log.take()]
    assert drawn == [0, 4, 8, 12]
    trace(log, replace(order(1, purpose=Purpose.EVALUATION), seed=4))
    failing = replace(order(1), seed=4)
    with contextlib.suppress(ValueError), log.claimed(failing):
        raise ValueError
    log.verified(failing, GroupProgress(engine="http://a", spans=[[(0, 1)]]))
    assert log.take() == [], "evaluations and groups that fail are not in it"


def test_actor_heartbeat_contains_at_most_4_timed_groups_with_at_most_32_version_spans_each():
    log = StageLog()
    for index in range(9):
        trace(log, replace(order(index), seed=4), [(version, 1) for version in range(50)])
    stages = log.take()
    assert [each.index for each in stages] == [0, 1, 2, 3]
    assert all(len(each.spans) == 32 for each in stages)


def test_verifier_errors_are_counted_by_domain_and_a_verdict_resets_the_count_of_consecutive_errors():
    tally = VerifierTally()
    tally.note("math", [Judgement(correct("1"), 0.5), Judgement(failed("broke"), 0.25), Judgement(timed_out(2.0), 2.0)])
    tally.note("code", [Judgement(failed("x"), 0.0)] * 3)
    assert tally.by_domain == {
        "math": VerifierFigures(
            judged=1,
            errors=1,
            timeouts=1,
            seconds=2.75,
            errors_in_a_row=1,
            timeouts_in_a_row=1,
            reason="timeout: no judgement within 2 s",
        ),
        "code": VerifierFigures(errors=3, errors_in_a_row=3, reason="verifier_error: x"),
    }
    tally.note("math", [Judgement(wrong("no"), 0.25)])
    assert tally.by_domain["math"] == VerifierFigures(judged=2, errors=1, timeouts=1, seconds=3.0)
    assert tally.by_domain["code"].errors_in_a_row == 3
