"""Real runs in real processes: their outputs, how they stop and resume, and what survives kill -9.

Whatever happens to the processes of a lockstep run, its training curve must equal the undisturbed run's bit for bit.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl.config.recipe import load
from pipelinerl.observability.events import read_events
from pipelinerl.system.machine import is_free
from tests.fakes.live_fleet import swap_to_and_fro
from tests.fakes.live_run import CLI, endless_run, launched, new_run, output_of, resumed
from tests.fakes.undisturbed import LOCKSTEP, STEPS, Kind, curve, undisturbed as undisturbed_run
from tests.fakes.wheel import install
from tests.faults.scenarios.system_killed import Learned, differences
from tests.patience import PATIENCE_S
from tests.plugins.trackers.event_files import series


def assert_settled(run, *, steps):
    """Assert that the run made all steps, that its ledger balances, and that none of its processes is left."""
    (finished,) = run.events("run_finished")
    ledger = finished["ledger"]
    assert ledger["issued"] == sum(count for outcome, count in ledger.items() if outcome != "issued"), ledger
    assert ledger["trained"] == steps * 8, ledger
    assert sorted(curve(run)) == list(range(1, steps + 1))
    assert run.is_gone()
    assert all(is_free(int(event["url"].rpartition(":")[2])) for event in run.events("engine_joined"))


def tracked_to(run):
    """Return the last step that the TensorBoard tracker has forwarded, from its bookmark file."""
    place = run.directory / "trackers" / "tensorboard.json"
    return int(json.loads(place.read_bytes())["reader"]["last_step"]) if place.is_file() else 0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Return the directory in which a wheel of the project is installed."""
    return install(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def undisturbed(wheel, tmp_path_factory):
    """Return a lockstep run of the shipped model that ended normally; the wheel made it, outside the checkout."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    directory, environment = elsewhere / "run", {"PYTHONPATH": str(wheel)}
    words = [sys.executable, "-c", "import launch, pipelinerl; print(launch.__file__, pipelinerl.__file__)"]
    imported = subprocess.check_output(words, text=True, cwd=elsewhere, env={**os.environ, **environment}).split()
    assert len(imported) == 2 and all(Path(file).is_relative_to(wheel) for file in imported)
    arguments = new_run(directory, *LOCKSTEP)
    with launched(arguments, directory, environment=environment, working_directory=elsewhere) as run:
        assert run.end() == 0, run.story()
        assert run.is_gone()
    return run


def test_installed_wheel_trains_and_leaves_events_reports_and_a_loadable_checkpoint(undisturbed):
    run = undisturbed
    assert_settled(run, steps=STEPS)
    assert {event["staleness_max"] for event in run.events("step")} == {1.0}
    assert load(run.directory / "recipe.toml").run.steps == STEPS
    assert [event["model_version"] for event in run.events("evaluation")] == [0, STEPS]
    for name in ("learning_curve.png", "report.html"):
        assert (run.directory / name).stat().st_size > 10_000
    from transformers import AutoModelForCausalLM, AutoTokenizer

    newest = run.directory / "checkpoints" / f"step-{STEPS:06d}"
    model = AutoModelForCausalLM.from_pretrained(newest)
    prompt = AutoTokenizer.from_pretrained(newest)("spell", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=2, do_sample=False).shape[1] == prompt["input_ids"].shape[1] + 2


def test_recorded_step_can_be_replayed_bit_by_bit(undisturbed):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    words = [*CLI, "replay", str(undisturbed.directory), "--step", str(STEPS - 1)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("bit-identical") == 3, "from the checkpoint at step 8 on"


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        pytest.param(Kind.BIGRAM, "between two lives", id="bigram-between two lives"),
        pytest.param(Kind.TINY, "between two lives", id="tiny-between two lives", marks=pytest.mark.slow),
        pytest.param(Kind.TINY, "in the second life", id="tiny-in the second life", marks=pytest.mark.slow),
    ],
)
def test_stopped_run_resumed_from_its_checkpoint_location_equals_the_undisturbed_run(tmp_path, kind, lost):
    """Ctrl-C stops the first launch; later the machine is lost with its disk, so only the copied checkpoints remain."""
    directory, location = tmp_path / "run", tmp_path / "location"
    with launched([*kind.arguments(directory), f"checkpoint.location={location}"], directory) as run:
        run.until_step(6)
        run.launcher.send_signal(signal.SIGINT)
        assert run.end() == 130, run.story()
        assert "did not stop within" not in run.output, "each role has ended by itself"
        assert f"pipelinerl run --resume {directory}" in run.output
        assert run.is_gone()
        suspended_at = saved_to_its_last_step(run)
    if lost == "in the second life":
        with launched(resumed(directory), directory) as run:
            run.until_step(suspended_at + 1)
            run.note_processes()
            run.launcher.kill()
            run.end()
            assert run.is_gone()
    shutil.rmtree(directory)
    with launched(["--resume", f"file://{location}/run"], directory) as run:
        assert run.end() == 0, run.story()
        assert_settled(run, steps=STEPS)
        first, *_, last = run.events("trainer_ready")
        assert (first["epoch"], first["model_version"], last["epoch"]) == (1, 0, 2)
        assert last["model_version"] == suspended_at >= 6, "no step was lost"
        elapsed = [event["elapsed_s"] for event in run.events()]
        assert elapsed == sorted(elapsed), "one time line over both lives"
    assert differences(Learned.by(undisturbed_run(kind)), Learned.by(run)) == []
    kept = {manifest.parent.name.split("-e")[0] for manifest in location.glob("run/step-*/manifest.json")}
    assert kept >= {"step-000008", "step-000012"} and len(kept) == load(directory / "recipe.toml").checkpoint.keep


def test_live_run_survives_killed_processes_and_a_replaced_engine(tmp_path):
    """Engine, trainer, controller and tracker are restarted; the tracker has each step of the run once.

    Then the run's engine is replaced without a grace period, and the requests in progress are handed over.
    """
    directory = tmp_path / "run"
    changes = ("staleness.k=4", "trackers.tensorboard=true")
    with launched(endless_run(directory, *changes), directory) as run:
        run.until_step(3)
        run.until(lambda run: tracked_to(run) > 0, "a figure to reach the tracker")
        run.role("tracker").kill()
        run.role("engine-0").kill()
        run.role("trainer").kill()
        run.role("controller").kill()
        run.until(lambda run: run.events("controller_returned"), "the controller's return")
        assert "k = 2" in output_of("knobs", "set", str(directory), "k=2", "j=2")
        run.until(lambda run: len(run.events("engine_joined")) >= 2, "the engine's return")
        run.until(lambda run: len(run.events("trainer_ready")) == 2, "the trainer's return")
        run.until_step(run.steps()[-1] + 2)
        run.until(lambda run: tracked_to(run) > 3, "the tracker's next life to go on")
        assert json.loads(output_of("status", str(directory), "--json"))["epoch"] == 2
        assert "waits for" in output_of("status", str(directory))
        assert "j = 2, k = 2 by" in output_of("knobs", "show", str(directory))
        assert swap_to_and_fro(run, ["bigram"], times=1, grace_s=0.0) == "engine-1"
        output_of("stop", str(directory))
        assert run.end() == 0, run.story()
        assert_settled(run, steps=max(run.steps()))
    assert not run.events("group_failed") and not run.events("engine_canary_failed"), run.story()
    assert [event["changes"] for event in run.events("knobs")] == [{"j": 2, "k": 2}]
    assert run.steps()[-1] == max(run.steps()), "the last word is of the last epoch"
    newest = max((directory / "checkpoints").iterdir())
    state = json.loads((newest / "manifest.json").read_text())["state"]
    assert [change["changes"] for change in state["controller"]["knob_log"]] == [{"j": 2, "k": 2}]
    last_words = {event["step"]: pytest.approx(event["reward"], abs=1e-5) for event in run.events("step")}
    assert series(directory / "tensorboard", "reward") == sorted(last_words.items())


# --- longer: make chaos -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["controller", "trainer", "actor-0", "engine-0", "redis"])
@pytest.mark.parametrize("step", [2, 6], ids=["before any checkpoint", "after a checkpoint"])
@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_killing_the_process_of_any_role_does_not_change_the_training_curve(tmp_path, undisturbed, role, step):
    directory = tmp_path / "run"
    with launched(new_run(directory, *LOCKSTEP), directory) as run:
        run.until_step(step)
        run.role(role).kill()
        assert run.end() == 0, run.story()
        assert_settled(run, steps=STEPS)
    assert f"{role} ended (killed by SIGKILL)" in run.output
    assert curve(run) == curve(undisturbed)


def saved_to_its_last_step(run):
    """Return the last step of a suspended run; assert that it was saved, even if no checkpoint was due."""
    events = read_events(run.directory / "events.jsonl")
    steps = [event["step"] for event in events if event["kind"] == "step"]
    saved = [event["model_version"] for event in events if event["kind"] == "checkpoint"]
    assert saved[-1] == steps[-1] and events[-1]["kind"] == "run_suspended"
    return int(saved[-1])


@pytest.mark.parametrize(
    "change",
    ["engine.on_update=abort", "engine.on_update=drain", "engine.on_update=recompute_kv", "objective=grpo",
     "objective=pipelinerl", "training.no_signal=filter"],
)  # fmt: skip
@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_run_completes_in_every_update_mode_and_objective(tmp_path, change):
    directory = tmp_path / "run"
    with launched(new_run(directory, "run.steps=20", "staleness.k=4", change), directory) as run:
        assert run.end() == 0, run.story()
        assert_settled(run, steps=20)
    mixed = max(event["mixed_version_fraction"] for event in run.events("step"))
    if "abort" in change or "drain" in change:
        assert mixed == 0.0, "one version for each rollout"
    assert max(event["staleness_max"] for event in run.events("step")) <= 4


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_stream_lengths_and_memory_of_a_long_run_stay_bounded(tmp_path):
    from redis import Redis

    directory = tmp_path / "run"
    with launched(new_run(directory, "run.steps=5000", "staleness.k=4"), directory) as run:
        run.until_step(60)
        (port,) = {c.laddr.port for c in run.role("redis").net_connections() if c.status == "LISTEN"}
        server = Redis(port=port, password=(directory / "redis" / "password").read_text())

        def lengths():
            return {str(key.decode()): int(server.xlen(key)) for key in server.keys("*")}

        def megabytes():
            roles = ("controller", "engine-0", "actor-0", "trainer", "redis")
            return {role: run.role(role).memory_info().rss / 2**20 for role in roles}

        before = megabytes()
        run.until_step(300)
        growth = {role: after - before[role] for role, after in megabytes().items()}
        measured = lengths()
        server.close()
        # The stream keeps groups since the oldest of three checkpoints: ten steps of eight groups each. At most four
        # steps of prompts are in flight.
        assert measured["run:rollouts:actor-0"] <= (3 + 1) * 10 * 8 + 10 * 8, measured
        assert measured["run:prompts"] <= 4 * 2 * 8, measured
        assert max(measured["run:directives"], measured["run:reports"]) <= 70, measured
        assert max(growth.values()) < 40, growth
