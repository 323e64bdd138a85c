"""Invariants hold for every simulated run, and simple runs take the time that a formula predicts."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings as effort, strategies as st

from inference_contract.weights import OnUpdate
from pipelinerl.plugins.simulation.hardware import (
    Contention,
    ControlTimes,
    EngineTimes,
    Hardware,
    TrainerTimes,
    UpdateTimes,
)
from pipelinerl.plugins.simulation.setting import FixedLengths, HeavyTailedLengths
from pipelinerl.plugins.simulation.simulator import POLL_S, simulate
from pipelinerl.roles.actor_role import REFRESH_S
from tests.plugins.simulation.settings import BALANCED, WHOLE, setting

BOUNDS = ((1, 1), (1, 2), (1, 8), (4, 8), (16, 16), (16, 32), (1, math.inf))


@effort(max_examples=25, deadline=None)
@given(
    engines=st.integers(1, 5),
    slots=st.sampled_from([3, 8, 64]),
    bounds=st.sampled_from(BOUNDS),
    on_update=st.sampled_from(list(OnUpdate)),
    groups=st.integers(1, 12),
    size=st.integers(1, 9),
    contention=st.sampled_from([1.0, 1.7]),
    filtered=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 5),
)
def test_simulated_runs_with_random_settings_finish_and_give_every_requested_group_an_outcome(
    engines, slots, bounds, on_update, groups, size, contention, filtered, seed
):
    drawn = {"engines": engines, "slots": slots, "on_update": on_update, "group_size": size, "seed": seed}
    drawn |= {"filtered": filtered, "oversample": 2.0 if filtered else 1.0}
    whole = setting(*bounds, rollouts_per_step=groups * size, attempts=10**6, steps=12, max_groups=64, **drawn)
    run = simulate(whole, replace(WHOLE, contention=Contention(engine=contention, trainer=contention)))
    account = run.account
    assert run.steps == 12
    ended = account.trained + account.filtered + account.stale + account.failed
    assert account.issued == ended + account.in_flight and 0 <= account.in_flight <= 64
    assert min(run.staleness) >= 1 and sum(run.staleness.values()) == pytest.approx(1)
    for share in (run.trainer_wait, run.trainer_computes, run.trainer_held, run.engine_idle, run.discarded):
        assert -1e-9 <= share <= 1 + 1e-9
    assert run.trainer_wait + run.trainer_computes + run.trainer_held <= 1 + 1e-9
    assert max(run.staleness) <= bounds[1]
    assert 0 < run.rows <= slots


def test_simulated_lockstep_run_with_fixed_answer_lengths_takes_the_time_of_its_formula():
    """One engine samples 64 answers of 20 tokens in 64 rows; sampling and training do not overlap."""
    control = ControlTimes(
        order_s=0.003, request_s=0.0, answer_s=0.0, verify_s=0.05, verifiers=None, deliver_s=0.004, report_s=0.02
    )
    hardware = replace(BALANCED, update=UpdateTimes(send_s=0.1, pause_s=0.01), control=control)
    run = simulate(setting(1, 1, lengths=FixedLengths(20)), hardware)
    decode = 20 * (0.01 + 0.0001 * 64)
    train = 2e-4 * 64 * (20 + 10)
    assert run.step_s == pytest.approx(0.02 + 0.1 + 0.01 + 0.003 + decode + 0.05 + 0.004 + train, rel=1e-9)
    assert run.staleness == {1: 1.0}
    assert run.discarded == 0
    assert run.engine_idle == pytest.approx(1 - decode / run.step_s)
    assert run.trainer_computes == pytest.approx(train / run.step_s)


def test_simulated_one_step_off_policy_run_takes_the_longer_of_sampling_and_training_time():
    """The engine samples the next batch while the trainer trains, so a step takes the longer of these two times."""
    decode = 20 * (0.01 + 0.0001 * 64)
    for token_s in (4e-5, 4e-4):
        hardware = replace(BALANCED, trainer=TrainerTimes(token_s=token_s))
        run = simulate(setting(1, 2, lengths=FixedLengths(20)), hardware)
        assert run.step_s == pytest.approx(max(decode, token_s * 64 * 30), rel=0.02)
        assert run.staleness == {2: 1.0}


def test_simulated_run_with_a_slow_trainer_keeps_fewer_rollouts_in_flight_without_slowing_the_trainer():
    """With k = 8, four steps may be in flight. A slow trainer needs two of them, and lags behind by two versions."""
    slow, fast = (replace(WHOLE, trainer=TrainerTimes(token_s=token_s)) for token_s in (6e-4, 2e-5))
    run = simulate(setting(1, 8, steps=80), slow)
    assert run.staleness_mean < 2.5 and run.trainer_wait < 0.05
    assert run.in_flight < 2.5 * 8
    run = simulate(setting(1, 8, steps=80), fast)
    assert run.in_flight > 3.5 * 8, "engines that are too slow get all that may be in flight"


def test_simulated_update_in_drain_mode_makes_the_trainer_wait_until_running_samples_end():
    """In continue mode, the engine samples while its weights are updated and while the trainer trains."""
    continued, drained = (
        simulate(setting(1, 8, on_update=on_update), BALANCED) for on_update in (OnUpdate.CONTINUE, OnUpdate.DRAIN)
    )
    assert drained.step_s > 1.2 * continued.step_s
    assert drained.trainer_held > 0.2
    assert continued.trainer_held == 0


@pytest.mark.parametrize(("j", "k"), [(1, 2), (1, 8), (16, 32)])
def test_simulated_throughput_never_falls_with_more_engines(j, k):
    """Throughput grows with the number of engines until the trainer is the bottleneck."""
    fast = replace(BALANCED, trainer=TrainerTimes(token_s=2e-5))
    speeds = [simulate(setting(j, k, engines=n, steps=60), fast).tokens_per_s for n in (1, 2, 4, 8, 16)]
    assert all(after > 0.97 * before for before, after in pairwise(speeds))
    assert speeds[2] > 1.2 * speeds[0]


@pytest.mark.parametrize("hardware", [BALANCED, WHOLE])
def test_simulated_groups_in_flight_satisfy_littles_law(hardware):
    """Groups in flight = groups that end per second × mean time in flight (Little 1961)."""
    run = simulate(setting(1, 8, steps=300), hardware)
    share_trained = run.account.trained / (run.account.stale + run.account.trained)
    ended_per_s = run.rollouts_per_s / 8 / share_trained
    assert run.in_flight == pytest.approx(ended_per_s * run.order_s, rel=0.05)


def test_simulated_engine_and_trainer_slow_each_other_down_if_they_compute_at_the_same_time():
    """With a slowdown of 2 while both compute, a step takes twice as long. In lockstep, where only one computes at a
    time, nothing changes.
    """
    shared = replace(BALANCED, contention=Contention(engine=2.0, trainer=2.0))
    for bounds, ratio in (((1, 1), 1.0), ((1, 8), 2.0)):
        alone, together = (
            simulate(setting(*bounds, lengths=FixedLengths(20)), each).step_s for each in (BALANCED, shared)
        )
        assert together / alone == pytest.approx(ratio, rel=0.25 if ratio > 1 else 1e-9)
        assert together >= alone


def test_simulated_run_is_determined_by_its_seed():
    first, again, other = (simulate(setting(1, 8, seed=seed), WHOLE) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_simulation_rejects_a_setting_with_which_a_run_would_wait_forever():
    """A step needs more rollouts than may be in flight, so it would wait forever."""
    with pytest.raises(ValueError, match="is deadlocked at step 1 of 40"):
        simulate(setting(1, 8, max_groups=4), BALANCED)


def test_age_of_a_simulated_group_counts_from_its_request_and_not_from_its_first_token():
    """Real actors count a group's age in the same way, so they drop some groups before a busy engine begins them."""
    few, many = (simulate(setting(1, 2, slots=slots, steps=60), WHOLE) for slots in (8, 512))
    assert few.account.stale > 0 and few.discarded < 0.01
    assert many.account.stale == 0 or many.discarded > 0
    assert POLL_S == REFRESH_S


@pytest.mark.parametrize("answer_s", [12.0, 14.0])
def test_large_bound_k_neither_slows_a_run_down_nor_ages_its_rollouts(answer_s):
    """Pacing waits until a change can show: one that grew after every step swung between 2 and 8 steps in flight."""
    hardware = Hardware(engine=EngineTimes(step_s=answer_s / 1000), trainer=TrainerTimes(token_s=5.0 / 512_000))
    runs = {
        k: simulate(
            replace(
                setting(1, k, steps=80, lengths=FixedLengths(1000)),
                engines=32, slots=64, rollouts_per_step=512, group_size=16, actors=4, groups_in_flight=256,
            ),
            hardware,
        )
        for k in (8, 16, 32)
    }  # fmt: skip
    for k in (16, 32):
        assert runs[k].step_s == pytest.approx(runs[8].step_s, rel=0.02)
        assert runs[k].staleness_mean == pytest.approx(runs[8].staleness_mean, abs=0.5)


@pytest.mark.parametrize(("lengths", "turns"), [(FixedLengths(30), True), (HeavyTailedLengths(20.0, 0.9, 200), False)])
def test_simulated_auto_takes_turns_on_shared_cores_unless_lag_saves_more(lengths, turns):
    """Answers of one length end together, so lag saves nothing; heavy tails leave the cores idle on policy."""
    shared = replace(BALANCED, contention=Contention(engine=2.0, trainer=2.0, apart=True))
    chosen = setting(1, 64, lengths=lengths, auto_j=True, lag_cost=0.02, steps=60)
    run = simulate(chosen, shared)
    assert (run.ahead == 1) is turns
    fixed = [simulate(setting(1, k, lengths=lengths, steps=60), shared) for k in (1, 2, 8)]
    assert run.steps_per_hour > 0.93 * max(each.steps_per_hour for each in fixed)
