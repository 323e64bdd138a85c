"""Every scenario with a few seeds, or many in `make chaos`; flawed designs (mutants) show that it can fail."""

import json
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress

import psutil
import pytest

from pipelinerl.controller.decisions import controller
from tests.fakes.live_run import LiveRun
from tests.faults.scenarios import episodes_killed, rank_killed, role_killed, starved, two_trainers
from tests.faults.scenarios.scenario import find, names, play
from tests.patience import PATIENCE_S


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
    *("frozen_engine", "slow_engine", "second_controller", "controller_without_continue"),
    *("verifier_killed", "episodes_killed"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in names()])
@pytest.mark.timeout(600)
def test_guarantees_of_each_fault_scenario_hold_for_a_few_seeds(name, capsys):
    played(name, find(name).short, capsys)


@pytest.mark.parametrize(("last", "is_lost"), [(18, False), (19, True)])
def test_check_of_group_counts_ignores_steps_of_a_killed_trainer_after_its_last_checkpoint(tmp_path, last, is_lost):
    """A rank died after version 19, before checkpoint 18 was complete, so steps 17 and 18 are made again."""
    ledger = {"issued": 175, "trained": 144, "stale": 15, "in_flight": 16}
    made = [*range(1, 20), *range(17, last + 1)]
    events = [{"kind": "step", "step": step} for step in made]
    log = "".join(json.dumps(event) + "\n" for event in [*events, {"kind": "run_finished", "ledger": ledger}])
    (tmp_path / "events.jsonl").write_text(log)
    broken = rank_killed.unbalanced(LiveRun(None, tmp_path, tmp_path / "out"), Counter())
    assert [each.startswith("19 versions of 8 groups each") for each in broken] == [True] * is_lost


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


#: tests/faults/test_exactly_once.py is the fast version of this test, without processes.
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


_PLAYING = """
import sys, time
from pathlib import Path
from tests.fakes.live_run import launched

with launched([], Path(sys.argv[1]) / "run", through=("sh", "-c", "exec sleep 1000", "sh")) as run:
    print(run.launcher.pid, flush=True)
    time.sleep(1000)
"""


def test_launcher_ends_when_the_process_that_started_it_is_killed(tmp_path):
    """A test that exceeds its time limit is killed by a signal, so no `finally` clause of it ends the launcher."""
    playing = subprocess.Popen([sys.executable, "-c", _PLAYING, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with playing:
        assert playing.stdout is not None
        launcher = psutil.Process(int(playing.stdout.readline()))
        playing.kill()
    deadline = time.monotonic() + PATIENCE_S
    try:
        while launcher.is_running() and launcher.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the launcher lives on"
            time.sleep(0.02)
    except psutil.NoSuchProcess:
        pass
    finally:
        with suppress(psutil.NoSuchProcess):
            launcher.kill()
