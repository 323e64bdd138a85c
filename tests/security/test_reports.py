"""Impossible reports to the controller go to the dead-letter stream; they neither change its state nor crash it."""

import random
from types import UnionType
from typing import Annotated, get_args, get_origin

import msgspec
import pytest

from pipelinerl.controller.decisions.report_checks import implausible
from pipelinerl.controller.service.journal import Journal
from pipelinerl.controller.state.inputs_and_effects import ReportReceived
from pipelinerl.controller.state.run_state import RunState
from pipelinerl.errors import LedgerError
from pipelinerl.messages import (
    REPORTS,
    ConsumedReport,
    EvaluationDone,
    GroupFailed,
    OrdersEnded,
    Report,
    StepDone,
    TrainerReady,
    decode_report,
)
from pipelinerl.streams.memory_stream import MemoryStream
from pipelinerl.streams.records import encode_group
from pipelinerl.streams.stream import DEAD_LETTERS, START
from pipelinerl.training.rollouts.rollout_reader import RolloutReader
from tests.controller.service.test_service import running, step
from tests.controller.world import ENGINE
from tests.fakes.rollouts import group

_NUMBERS = (-(2**62), -1, 0, 1, 2, 3, 5, 60, 2**20, 2**31, 2**53, 2**62)
_TEXTS = ("", "x", "e1-step-1", "prompt-000001", "eval-0-1-000000", ENGINE, "x" * 100_000, "\u0000", "training")


@pytest.fixture
async def run(tmp_path):
    async with running(tmp_path) as made:
        yield made


def account(**fields):
    return OrdersEnded(epoch=1, model_version=0, consumed=ConsumedReport(**fields))


@pytest.mark.parametrize(
    "forged",
    [
        account(trained=10**6),
        account(trained=-3),
        account(trained=1, frontier=2),
        account(trained=3, frontier=2, beyond=[2]),
        account(trained=4, frontier=2, beyond=[5, 5]),
        account(frontier=1, beyond=[-1]),
        account(trained=2**60, frontier=2**60),
        account(trained=1, beyond=[2**62]),
        StepDone(report_id="e7-step-9", epoch=7, model_version=9, consumed=ConsumedReport(), stats={}),
        StepDone(report_id="e1-step-9", epoch=1, model_version=2**50, consumed=ConsumedReport(), stats={}),
        TrainerReady(report_id="r", incarnation="r", model_version=0, consumed=ConsumedReport(), claimed=2**40),
        TrainerReady(report_id="r", incarnation="r", model_version=2**50, consumed=ConsumedReport()),
    ],
    ids=lambda forged: str(forged)[:40],
)
async def test_report_with_impossible_counts_epochs_or_versions_goes_only_to_the_dead_letter_stream(run, forged):
    await run.start()
    await run.tell(step(1))
    before = msgspec.msgpack.encode(run.controller.state.account)
    await run.tell(forged)
    assert run.stream_length(DEAD_LETTERS) == 1 and len(run.events("report_refused")) == 1
    assert msgspec.msgpack.encode(run.controller.state.account) == before and run.controller.state.epoch == 1
    await run.tell(step(2))
    assert run.controller.state.version == 2
    recovered = await Journal.recover(run.stream)
    assert recovered is not None, "a controller that comes back finds nothing of it"
    given = [decision.given for decision in recovered.decisions]
    assert forged not in [one.report for one in given if isinstance(one, ReportReceived)]


async def test_evaluation_results_with_forged_problem_numbers_or_counts_are_rejected(tmp_path):
    async with running(tmp_path, evaluation_problems=3) as run:
        await run.start()
        evaluation = run.controller.state.evaluations.current
        assert evaluation is not None and evaluation.next_index == 3
        order = f"eval-{evaluation.model_version}-{evaluation.number}-000000"
        done = {"order_id": order, "oldest_version": 0, "newest_version": 0, "num_tokens": 1}
        forged = [EvaluationDone(index=index, correct=1, judged=1, **done) for index in (7, 8, 9)]
        forged += [EvaluationDone(index=0, correct=n, judged=judged, **done) for n, judged in ((5, 1), (9, 9))]
        await run.tell(*forged, GroupFailed(order_id=order, index=2**40, purpose="evaluation", reason="x"))
        assert run.stream_length(DEAD_LETTERS) == 6
        assert run.controller.state.evaluations.current is evaluation and evaluation.answers == {}


async def test_controller_decision_that_raises_an_error_is_rolled_back(run):
    """The report goes to the dead-letter stream, and state changes made before the failure are undone."""
    await run.start()
    decide = run.controller.decide

    def stumbling(given):
        if isinstance(given, ReportReceived) and getattr(given.report, "model_version", 0) == 1:
            run.controller.state.version = 77
            raise LedgerError("the account does not balance")
        return decide(given)

    run.controller.decide = stumbling
    await run.tell(step(1))
    assert run.controller.state.version == 0 and run.stream_length(DEAD_LETTERS) == 1
    run.controller.decide = decide
    await run.tell(step(1))
    assert run.controller.state.version == 1


def _hostile(draw, kind):
    if get_origin(kind) is Annotated:  # the bounds, which hostile values ignore
        kind = kind.__origin__
    if kind is int:
        return draw.choice(_NUMBERS)
    if kind is float:
        return draw.choice((0.0, -1.0, 1e308, -1e308, float("nan"), float("inf"), 1e-320))
    if kind is str:
        return draw.choice(_TEXTS)
    if kind is bool:
        return draw.random() < 0.5
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _message(draw, kind)
    origin, inner = getattr(kind, "__origin__", None), get_args(kind)
    if isinstance(kind, UnionType):
        return _hostile(draw, draw.choice(inner))
    if kind is type(None):
        return None
    if origin is tuple:
        return [_hostile(draw, each) for each in inner]
    if origin is list:
        return [_hostile(draw, inner[0]) for _ in range(draw.choice((0, 1, 3)))]
    if origin is dict:
        return {_hostile(draw, inner[0]): _hostile(draw, inner[1]) for _ in range(draw.choice((0, 1, 3)))}
    return draw.choice(list(kind))  # `kind` is an enumeration


def _message(draw, kind):
    fields = msgspec.structs.fields(kind)
    drawn = {field.name: _hostile(draw, field.type) for field in fields}
    if "epoch" in drawn and draw.random() < 0.7:
        drawn["epoch"] = 1
    if kind is ConsumedReport and draw.random() < 0.5:  # half of the accounts are consistent
        frontier = draw.randrange(0, 12)
        drawn = {"trained": frontier, "frontier": frontier}
    return kind(**drawn)


async def test_no_hostile_report_makes_the_controller_fail(run):
    """The controller rejects or processes each of 2000 reports whose fields are as hostile as their types allow."""
    await run.start()
    await run.tell(step(1))
    draw, controller = random.Random(0), run.controller
    start, refused, decided = msgspec.msgpack.encode(controller.state), 0, 0
    for _ in range(2000):
        try:
            forged = decode_report(msgspec.msgpack.encode(_message(draw, draw.choice(get_args(Report)))))
            refused_now = bool(implausible(controller.state, forged))
        except msgspec.ValidationError:
            refused_now = True
        if refused_now:
            refused += 1
            continue
        controller.decide(ReportReceived(now=1.0, report=forged, entry_id="1-0"))
        decided += 1
        if decided % 20 == 0:
            controller.state = msgspec.msgpack.decode(start, type=RunState)
    assert min(refused, decided) > 300, (refused, decided)


async def test_trainer_reports_the_request_for_an_unreadable_rollout_group_as_failed():
    """Otherwise the group would count as in flight until the run has no other group left to train on."""
    stream = MemoryStream()
    reader = RolloutReader(stream, offsets={}, rescan_s=0.0, frontier=lambda: 7)
    await reader.start()
    damaged = bytearray(encode_group(group(9)))
    damaged[-20] ^= 1
    ended, cut = encode_group(group(3)), encode_group(group(11))[:40]
    await stream.append("rollouts:a", [bytes(damaged), ended[:-20] + b"x" + ended[-19:], cut, encode_group(group(8))])
    groups = []
    for _ in range(3):
        groups += (await reader.read(block_s=0.1)).groups
    assert [each.index for each in groups] == [8]
    reports = [decode_report(entry.payload) for entry in await stream.read({REPORTS: START}, count=10, block_s=0)]
    assert [(type(report), report.index) for report in reports if isinstance(report, GroupFailed)] == [(GroupFailed, 9)]
    assert len(reports) == 1 and "cannot be read" in reports[0].reason
