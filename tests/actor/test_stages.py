"""Tests of the log of when groups are claimed, sampled and verified: which groups it traces, and its size limits."""

from __future__ import annotations

from itertools import count

from inference_contract.schemas import AssistantMessage, Choice, FinishReason
from pipelinerl.actor.stages import StageLog
from pipelinerl.types import Message, Problem, PromptOrder, Purpose, Sampling

PROBLEM = Problem(problem_id="p", domain="d", messages=(Message("user", "q"),), ground_truth="a")


def _order(index: int, *, seed: int = 4, purpose: Purpose = Purpose.TRAINING) -> PromptOrder:
    return PromptOrder(
        order_id=f"prompt-{index}",
        index=index,
        purpose=purpose,
        problem=PROBLEM,
        sampling=Sampling(num_samples=2),
        seed=seed,
    )


def _choice(spans: list[tuple[int, int]]) -> Choice:
    tokens = sum(number for _, number in spans)
    return Choice(
        index=0,
        message=AssistantMessage(content="a"),
        finish_reason=FinishReason.STOP,
        token_ids=[1] * tokens,
        version_spans=spans,
    )


def _log() -> StageLog:
    ticks = count(1)
    return StageLog(clock=lambda: float(next(ticks)))


def _done(log: StageLog, order: PromptOrder, *choices: Choice) -> None:
    with log.claimed(order):
        log.sampled(order, "http://a")
        log.verified(order, [choice.version_spans or () for choice in choices or [_choice([(0, 1)])]])


def test_traced_group_is_reported_once_with_the_version_spans_of_its_longest_answer() -> None:
    log = _log()
    _done(log, _order(7), _choice([(0, 1)]), _choice([(0, 2), (1, 3)]))
    (told,) = log.take()
    assert (told.index, told.claimed, told.sampled, told.verified, told.engine) == (7, 1.0, 2.0, 3.0, "http://a")
    assert told.spans == [(0, 2), (1, 3)]
    assert log.take() == []


def test_stage_log_traces_a_quarter_of_training_orders_chosen_by_seed() -> None:
    log = _log()
    drawn = []
    for seed in range(16):
        _done(log, _order(seed, seed=seed))
        drawn += [told.index for told in log.take()]
    assert drawn == [0, 4, 8, 12]
    _done(log, _order(1, purpose=Purpose.EVALUATION))
    assert log.take() == []


def test_heartbeat_contains_a_bounded_number_of_traced_groups_and_version_spans() -> None:
    log = _log()
    for index in range(9):
        _done(log, _order(index), _choice([(version, 1) for version in range(50)]))
    told = log.take()
    assert [each.index for each in told] == [0, 1, 2, 3]
    assert all(len(each.spans) == 32 for each in told)


def test_failed_order_is_not_in_the_stage_log() -> None:
    log = _log()
    order = _order(1)
    try:
        with log.claimed(order):
            raise ValueError
    except ValueError:
        log.sampled(order, "http://a")
        log.verified(order, [[(0, 1)]])
    assert log.take() == []
