"""Every scenario with a few seeds, or many in `make chaos`; flawed designs (mutants) show that it can fail."""

import pytest

from pipelinerl.controller.decisions import controller
from tests.faults.scenarios import episodes_killed, role_killed, starved, two_trainers
from tests.faults.scenarios.scenario import find, names, play


def played(name, seeds, capsys):
    tally = play(find(name), seeds)
    with capsys.disabled():
        print(f"\n{tally}")
    assert tally.broken == [], "\n".join(tally.broken)


#: Scenarios that are too slow for `make test`. Faster tests of the same promises: for dead engines,
#: tests/weights/broadcast/test_publisher.py and test_api.py; for a killed run, tests/end_to_end/test_live_run.py; for a
#: frozen engine, tests/weights/test_grace.py and test_engine_decisions.py; for a slow one, test_pool.py; for a second
#: controller, tests/roles/test_controller_role.py; for a verifier service, its test_client.py; for episodes,
#: tests/plugins/episodes.
SLOW = {
    *("system_killed", "rank_killed", "oubliette_killed", "told_to_stop", "dead_offers", "knobs_turned"),
    *("frozen_engine", "slow_engine", "second_controller"),
    *("verifier_killed", "episodes_killed"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in names()])
@pytest.mark.timeout(600)
def test_guarantees_of_each_fault_scenario_hold_for_a_few_seeds(name, capsys):
    played(name, find(name).short, capsys)


@pytest.mark.parametrize("name", names())
@pytest.mark.chaos
@pytest.mark.timeout(7200)
def test_guarantees_of_each_fault_scenario_hold_for_many_seeds(name, capsys):
    played(name, find(name).long, capsys)


#: Part of the controller's error about a trainer that trained a group twice.
COUNTED_TWICE = "its account counts orders twice"


def first_that_fails(attempt, figure):
    """Play a few seeds, and return the verdict of the first that catches the mutant; a seed may miss it by chance."""
    for seed in range(4):
        verdict = attempt(seed)
        if verdict.figures[figure] or (figure == "trained twice" and COUNTED_TWICE in " ".join(verdict.broken)):
            return verdict
    raise AssertionError(f"no seed shows {figure!r}; the last verdict is {verdict}")


@pytest.mark.parametrize(("mutant", "figure"), [("ack_before", "lost"), ("ack_after", "trained twice")])
@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_fault_scenario_detects_groups_lost_or_repeated_by_a_trainer_that_acknowledges_them(tmp_path, mutant, figure):
    def attempt(seed):
        return role_killed.play(seed, tmp_path / str(seed), mutant=mutant, kills=3)

    assert first_that_fails(attempt, figure).broken


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_fault_scenario_detects_an_actor_that_reports_one_weight_version_for_a_whole_answer(tmp_path):
    assert "a span of version" in " ".join(episodes_killed.play(0, tmp_path, mutant="newest", kills=0).broken)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_replaced_trainer_still_commits_its_checkpoint_if_fencing_by_epoch_is_disabled(tmp_path):
    for seed in range(2):
        verdict = two_trainers.play(seed, tmp_path / str(seed), mutant="unfenced", take_overs=1)
        assert "in place" in " ".join(verdict.broken), f"seed {seed} shows nothing: {verdict}"


def test_fault_scenario_detects_a_watchdog_that_counts_filtered_groups_as_progress(monkeypatch, tmp_path):
    mark = controller.progress_mark
    monkeypatch.setattr(controller, "progress_mark", lambda state: (*mark(state), state.account.ended))
    seed = list(starved.Situation).index(starved.Situation.NO_SIGNAL)
    assert "the watchdog must speak once" in " ".join(starved.play(seed, tmp_path).broken)
