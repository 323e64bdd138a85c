"""Tests that a run makes its next steps from every reachable state within a bounded number of events."""

import random

import pytest

from pipelinerl.controller.decisions import controller as controller_module
from pipelinerl.controller.decisions.directives import publication_due
from pipelinerl.controller.decisions.giving_up import waiting_for
from pipelinerl.controller.state.inputs_and_effects import KnobsPatched, Ticked
from pipelinerl.training.rollouts.admission import GroupOutcome
from tests.controller.unfair_world import UnfairWorld, played
from tests.controller.world import ENGINE, World, controller

#: The number of random sequences per test. A slow test plays a hundred thousand.
_AT_ONCE = 125


def _stuck(seeds):
    problems = []
    for seed in seeds:
        world, waits = played(seed)
        problems += [f"seed {seed} waits for {waits} after {world.history}"] if waits else []
        problems += [f"seed {seed} repeats {world.repeated} after {world.history}"] if world.repeated else []
    return problems


@pytest.mark.parametrize("part", range(4))
def test_run_recovers_after_random_event_sequences(part):
    assert _stuck(range(part * _AT_ONCE, (part + 1) * _AT_ONCE)) == []


def test_directive_that_is_sent_to_the_trainer_again_does_not_undo_a_change_of_knobs():
    """With the old knobs the trainer would wait for more rollouts than the controller issues."""
    assert _stuck(range(11571, 11572)) == []


@pytest.mark.parametrize("seed", [80042, 82065, 82481])
def test_trainer_that_falls_back_to_the_initial_weights_does_not_wait_for_an_evaluation_of_lost_weights(seed):
    assert _stuck(range(seed, seed + 1)) == []


def _lockstep_with_deaths(seed, *, steps=6):
    """Return a lockstep run of two groups per step, whose trainer died several times before any checkpoint."""
    rng = random.Random(seed)
    world = UnfairWorld(rng, controller(k=1.0, evaluation_problems=0, steps=1000), reliable=True)
    acts = [world.sample, world.read_directives, world.step, world.read_directives, world.step]
    acts += [lambda: world.publish(fair=True), lambda: world.prove(fair=True)]
    acts += [lambda: world.answer(fair=True, gives_up=rng.random() < 0.3)]
    deaths = 3
    for _ in range(4000):
        if world.version >= steps:
            return world
        if deaths and rng.random() < 0.01:
            deaths -= 1
            world.inbox.clear()
            world.begin_trainer()
        rng.choice(acts)()
    raise AssertionError(f"seed {seed} stops at version {world.version}: {waiting_for(world.state, now=0.0)}")


@pytest.mark.parametrize("part", [*range(4), *(pytest.param(part, marks=pytest.mark.slow) for part in range(4, 8))])
def test_lockstep_run_trains_the_same_groups_at_each_step_even_if_trainers_die(part):
    """Groups of lost steps are still being sampled while the new trainer repeats the steps."""
    for seed in range(part * 50, part * 50 + 50):
        world = _lockstep_with_deaths(seed)
        assert world.trained == {step: [2 * step - 2, 2 * step - 1] for step in range(1, world.version + 1)}, seed
        assert world.batcher.ledger.counts[GroupOutcome.STALE] == 0, seed


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(20))
def test_run_recovers_after_each_of_a_hundred_thousand_random_event_sequences(part):
    assert _stuck(range(part * 5000, (part + 1) * 5000)) == []


def test_some_runs_stall_if_running_engines_get_weights_only_at_training_steps(monkeypatch):
    """The test restores an earlier rule, by which only engines without weights get a publication between steps."""

    def at_steps_alone(state, settings, **between_steps):
        due = publication_due(state, settings, **between_steps)
        return due if not between_steps or set(due) <= set(state.fleet.without_weights()) else []

    monkeypatch.setattr(controller_module, "publication_due", at_steps_alone)
    assert any(played(seed)[1] for seed in range(100))


def test_lowering_staleness_bounds_until_the_served_version_is_too_old_causes_a_publication():
    """The trainer waits for rollouts and no prompts may be issued, so the publication cannot wait for a step."""
    run = World(controller(evaluation_problems=0, j=8, k=8, steps=100)).begin(serves=True).until_version(4)
    while run.publications:
        run.publish()
    assert run.loaded[ENGINE] == 0
    run.give(KnobsPatched(now=0.0, changes={"j": 2, "k": 2}, who="test", time=0.0))
    assert [directive.publish_to for _, directive in run.publications] == [[ENGINE]]
    run.give(Ticked(now=1.0))
    assert len(run.publications) == 1, "it is under way, and is not directed twice"
    run.publish()
    assert run.loaded[ENGINE] == 4
