"""A live run whose trainer has one process, then two, then one again, and resumes each time without losing a step."""

import signal

import pytest

from tests.fakes.live_run import launched, new_run, resumed

MESH = "\n[trainer.options.mesh]\ndp_shard = 2\n"


def suspended(run):
    """Interrupt the run with Ctrl-C; return the model version that it saved."""
    run.launcher.send_signal(signal.SIGINT)
    assert run.end() == 130, run.story()
    assert run.is_gone()
    return max(event["model_version"] for event in run.events("checkpoint"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_resumes_when_its_trainer_changes_from_one_process_to_two_and_back(tmp_path):
    directory = tmp_path / "run"
    recipe = directory / "recipe.toml"
    saved = []
    with launched(new_run(directory, "run.steps=100000", "figures.exact_entropy_interval=2"), directory) as run:
        run.until_step(3)
        saved.append(suspended(run))
    alone = recipe.read_text()
    for number, text in enumerate([alone + MESH, alone], start=1):
        recipe.write_text(text)
        with launched(resumed(directory), directory) as run:
            run.until(lambda run, lives=number: len(run.events("trainer_ready")) > lives, "the trainer's return")
            assert run.events("trainer_ready")[number]["model_version"] == saved[-1], "no step was lost"
            run.until_step(saved[-1] + 2)
            saved.append(suspended(run))
    steps = run.steps()
    assert steps == list(range(1, len(steps) + 1)), "each once"
    measured = [event["step"] for event in run.events("step") if "exact_entropy" in event]
    assert measured == steps[1::2], "by one process as by two"
    states = [directory / "checkpoints" / f"step-{version:06d}" / "trainer" for version in saved]
    divided = {
        version: (state / "shards").is_dir() for version, state in zip(saved, states, strict=True) if state.is_dir()
    }
    assert divided[saved[1]] and not divided[saved[2]]
