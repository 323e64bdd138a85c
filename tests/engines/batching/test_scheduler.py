"""Tests that the scheduler keeps rows contiguous, moves rows without overlap, and orders requests by priority."""

import pytest

from inference_contract.errors import InvalidRequest, Overloaded
from pipelinerl import rng
from pipelinerl.engines.batching.model_runner import Capacity, Moves, Scheduler
from pipelinerl.engines.batching.sample_loop import CacheRoom
from tests.fakes.sample_request import sample_request


def _request(name, samples=1, prompt=3, priority=0):
    request = sample_request([0] * prompt, token_limit=5, request_id=name, priority=priority)
    for key in range(samples):
        request.add_sequence(key)
    return request


def _scheduler(*requests, slots=4, max_waiting=100, prefill_tokens=1000):
    made = Scheduler(Capacity(slots, max_waiting), prefill_tokens)
    for request in requests:
        made.submit(request)
    return made


def test_scheduler_admits_the_samples_of_one_request_together_in_order_of_arrival():
    first, second = _request("a", samples=3), _request("b", samples=3)
    scheduler = _scheduler(first, second, slots=4)
    admitted = scheduler.admit()
    assert [(each.request, each.rows, each.sibling) for each in admitted] == [
        (first, [0, 1, 2], None),
        (second, [3], None),
    ]
    assert scheduler.num_waiting == 2


def test_scheduler_admits_only_with_a_free_row_and_blocks_that_may_have_become_free():
    """After `admit` found no free blocks, it can admit only after a sequence has ended or a request has arrived."""
    scheduler, full = _scheduler(slots=2), CacheRoom(blocks=4, free=0, size=8, reused_tokens=0)
    assert not scheduler.admissible
    scheduler.submit(_request("a"))
    assert scheduler.admissible
    scheduler.admit(CacheRoom(blocks=4, free=4, size=8, reused_tokens=0))
    scheduler.submit(_request("b"))
    assert scheduler.admissible
    assert scheduler.admit(full) == []
    assert not scheduler.admissible
    scheduler.submit(_request("c", priority=-1))
    assert scheduler.admissible
    assert scheduler.admit(full) == []
    scheduler.retire([0])
    assert scheduler.admissible
    scheduler.admit()
    assert (len(scheduler.running), scheduler.num_waiting, scheduler.admissible) == (2, 0, 0)
    scheduler.submit(_request("d"))
    assert not scheduler.admissible, "all rows are in use"


def test_request_with_lowest_priority_value_starts_first_and_ties_go_to_the_oldest():
    """Urgent requests also start before the waiting samples of a started request, but preempt no running sample."""
    begun = (_request("begun", samples=3), _request("a"), _request("later", priority=1), _request("b"))
    scheduler = _scheduler(*begun, slots=2)
    scheduler.admit()
    for request in (_request("soon", priority=-1), _request("first", priority=-2), _request("soon too", priority=-1)):
        scheduler.submit(request)
    began = []
    while scheduler.running:
        scheduler.retire([0])
        began += [each.request.request_id for each in scheduler.admit()]
    assert began == ["first", "soon", "soon too", "begun", "a", "b", "later"]


def test_sample_that_starts_late_copies_the_prompt_cache_of_a_running_sample_of_its_request():
    request = _request("a", samples=3)
    scheduler = _scheduler(request, slots=2)
    scheduler.admit()
    scheduler.retire([0])
    (late,) = scheduler.admit()
    assert (late.rows, late.sibling) == ([1], 0)
    assert late.sequences == [request.sequences[2]]


def test_sample_that_starts_late_copies_no_prompt_cache_if_the_other_samples_of_its_request_have_ended():
    scheduler = _scheduler(_request("a", samples=3), slots=2)
    scheduler.admit()
    scheduler.retire([0, 1])
    (late,) = scheduler.admit()
    assert late.sibling is None


def test_scheduler_queue_limit_counts_samples_not_requests():
    scheduler = _scheduler(_request("running", samples=4), slots=4, max_waiting=3)
    scheduler.admit()
    scheduler.submit(_request("a", samples=2))
    with pytest.raises(Overloaded, match="at most 3 samples, 2 wait and 2 more"):
        scheduler.submit(_request("b", samples=2))
    scheduler.submit(_request("c", samples=1))


def test_samples_that_fit_into_free_batch_rows_do_not_count_towards_the_queue_limit():
    scheduler = _scheduler(_request("a", samples=6), slots=4, max_waiting=2)
    with pytest.raises(Overloaded):
        scheduler.submit(_request("b"))
    scheduler.admit()
    assert scheduler.num_waiting == 2
    scheduler.retire([0])
    scheduler.submit(_request("b"))


@pytest.mark.parametrize("running", [0, 4])
def test_request_with_more_samples_than_batch_rows_plus_queue_slots_is_rejected(running):
    scheduler = _scheduler(slots=4, max_waiting=2)
    if running:
        scheduler.submit(_request("running", samples=running))
        scheduler.admit()
    with pytest.raises(InvalidRequest, match=r"n must be at most 6, the 4 samples that run .* got 7") as raised:
        scheduler.submit(_request("more than rows and queue", samples=7))
    assert raised.value.param == "n" and scheduler.num_waiting == 0


def test_prompts_beyond_the_prefill_budget_wait_but_a_single_longer_prompt_is_admitted():
    prompts = {"a": 50, "b": 6, "c": 5}
    scheduler = _scheduler(*(_request(name, prompt=length) for name, length in prompts.items()), prefill_tokens=10)
    for name in prompts:
        assert scheduler.admissible
        assert [each.request.request_id for each in scheduler.admit()] == [name]


def test_withdrawn_request_leaves_the_queue_and_frees_its_batch_rows():
    gone, other = _request("a", samples=3), _request("b")
    scheduler = _scheduler(gone, other, slots=2)
    scheduler.admit()
    assert scheduler.withdraw(gone) == [0, 1]
    scheduler.retire([0, 1])
    assert scheduler.num_waiting == 1
    assert [each.request for each in scheduler.admit()] == [other]


@pytest.mark.parametrize("seed", range(20))
def test_batch_rows_in_use_stay_contiguous_and_moves_between_rows_do_not_overlap(seed):
    """Replay the moves on an array of rows, as a runner does, and compare the array with the scheduler's own list."""
    random = rng.generator(seed, "scheduler")
    scheduler = _scheduler(slots=8)
    rows = {}
    for step in range(60):
        if scheduler.num_waiting < 20:
            scheduler.submit(_request(f"r{step}", samples=int(random.integers(1, 6))))
        for admission in scheduler.admit():
            rows.update(zip(admission.rows, admission.sequences, strict=True))
        count = len(scheduler.running)
        ended = [row for row in range(count) if random.random() < 0.3]
        moves = scheduler.retire(ended)
        assert not set(moves.sources) & set(moves.targets)
        assert len(set(moves.targets)) == len(moves.targets) <= len(ended)
        taken = [rows[source] for source in moves.sources]
        rows.update(zip(moves.targets, taken, strict=True))
        rows = {row: rows[row] for row in range(count - len(ended))}
        assert list(rows.values()) == scheduler.running


def _room(free, blocks=100):
    return CacheRoom(blocks=blocks, free=free, size=4, reused_tokens=0)


def test_scheduler_admits_only_as_many_samples_as_the_free_cache_blocks_hold():
    """The nine prompt tokens fill two blocks, which the samples share; each sample needs one further block."""
    scheduler = _scheduler(_request("a", samples=4, prompt=9), slots=8)
    assert scheduler.admit(_room(2)) == []
    assert [each.rows for each in scheduler.admit(_room(5))] == [[0, 1, 2]]
    assert scheduler.num_waiting == 1


def test_preempted_sequence_is_admitted_before_waiting_requests():
    scheduler = _scheduler(_request("a", samples=2), slots=4)
    scheduler.admit(_room(9))
    scheduler.submit(_request("b", priority=-1))
    preempted = scheduler.running[0]
    assert scheduler.preempt(0) == Moves([1], [0]) and scheduler.any_preempted and scheduler.num_waiting == 2
    assert scheduler.admit(_room(0)) == [], "without room, nothing else is admitted either"
    admitted = scheduler.admit(_room(9))
    assert [each.sequences[0] for each in admitted] == [preempted, scheduler.running[2]]
    assert not scheduler.any_preempted and scheduler.num_waiting == 0


def test_scheduler_admits_only_preempted_sequences_while_samples_drain_before_a_weight_update():
    scheduler = _scheduler(_request("a"), slots=4)
    scheduler.admit(_room(9))
    scheduler.submit(_request("b"))
    scheduler.preempt(0)
    assert [each.request.request_id for each in scheduler.admit(_room(9), new=False)] == ["a"]


def test_withdrawing_a_request_drops_its_preempted_sequences():
    request = _request("a", samples=2)
    scheduler = _scheduler(request, slots=4)
    scheduler.admit(_room(9))
    scheduler.preempt(1)
    assert scheduler.withdraw(request) == [0]
    assert (scheduler.any_preempted, scheduler.num_waiting) == (False, 0)
