"""A run with six optimizer steps per batch whose trainer is killed: each step trains once, with identical results."""

import shutil
from io import StringIO

import pytest
from rich.console import Console

from pipelinerl.commands.remote import controller_of
from pipelinerl.plugins.replay.explain import OfRun, show as explain
from pipelinerl.plugins.replay.replayed_run import show as replay
from tests.fakes.live_run import launched, new_run
from tests.fakes.undisturbed import LOCKSTEP

EPOCHS, MINI_BATCHES = 2, 3
SETTINGS = (
    *LOCKSTEP,
    "run.steps=5000",
    "checkpoint.keep=5000",
    f"training.epochs={EPOCHS}",
    f"training.mini_batches={MINI_BATCHES}",
    "training.target_kl=10.0",
    "objective.grad1.epsilon_low=0.02",
    "objective.grad1.epsilon_high=0.02",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_with_epochs_is_bit_identical_after_its_trainer_is_killed(tmp_path):
    """Replay the recorded steps in an uninterrupted trainer: each result must equal the run's, also after the kill."""
    directory = tmp_path / "run"
    with launched(new_run(directory, *SETTINGS), directory) as run:
        run.until(lambda run: len(run.events("checkpoint")) >= 2, "a second checkpoint")
        run.role("trainer").kill()
        run.until(lambda run: len(run.events("trainer_ready")) == 2, "the trainer's return")
        run.until_step(run.events("trainer_ready")[1]["model_version"] + 2)
        with controller_of(directory) as controller:
            controller.stop()
        assert run.end() == 0, run.story()
        (finished,) = run.events("run_finished")
        steps = {event["step"]: event for event in run.events("step")}
        again = run.events("trainer_ready")[1]["model_version"]
    assert sorted(steps) == list(range(1, max(steps) + 1)), "a version is a batch"
    made = [len(step["updates"]) for step in steps.values()]
    assert made == [step["optimizer_steps"] for step in steps.values()]
    assert set(made) <= {2, 4, 6} and max(made) > 2, "where few groups have a signal there are fewer mini-batches"
    ledger = finished["ledger"]
    assert ledger["trained"] == 8 * max(steps), "each group once, whatever the epochs"
    assert ledger["issued"] == sum(count for outcome, count in ledger.items() if outcome != "issued")
    assert again % 4 == 0 and again < max(steps), "a checkpoint lies between batches"
    updates = [update for step in steps.values() for update in step["updates"]]
    assert max(update["clip_fraction"] for update in updates) > 0, "clipping over old is real"

    table_console = Console(file=StringIO(), width=200)
    explain(str(directory / "recipe.toml"), [], [], table_console, of_run=OfRun(directory, again + 1))
    assert f"optimizer steps of step {again + 1}" in table_console.file.getvalue()
    oldest, *later = sorted((directory / "checkpoints").glob("step-*"))
    for checkpoint in later:
        shutil.rmtree(checkpoint)  # keep only the oldest checkpoint, so that the replay begins before the kill
    began = int(oldest.name.removeprefix("step-"))
    assert began < again
    replayed = Console(file=StringIO(), width=200)
    assert replay(directory, step=again + 2, objective=None, console=replayed)
    assert replayed.file.getvalue().count("bit-identical") == again + 2 - began
