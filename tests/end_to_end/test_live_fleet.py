"""Engines join, leave, die and are replaced while a real run trains on their rollouts: nothing is lost."""

import pytest

from tests.fakes.live_fleet import (
    assert_nothing_lost,
    engines,
    kill_again_and_again,
    longest_stall_s,
    swap_to_and_fro,
    until_serving,
)
from tests.fakes.live_run import endless_run, launched, new_run, output_of

LONG = ("run.steps=100000", "staleness.k=8", "checkpoint.interval_steps=50", "launch.restarts=1000")


def stop(run):
    """Stop the run with `pipelinerl stop`, as a user would."""
    output_of("stop", str(run.directory))
    assert run.end() == 0, run.story()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_engine_that_cannot_start_does_not_affect_the_run(tmp_path):
    """The name of the failed engine is not used again."""
    directory = tmp_path / "run"
    with launched(endless_run(directory, *LONG), directory) as run:
        until_serving(run, "engine-0")
        assert engines(run, "add", "--type", "vllm_server", "--no-wait") == "requested engine-1\n"
        assert swap_to_and_fro(run, ["bigram"], times=1) == "engine-2"
        assert "the run continues without engine-1" in run.output and "engine.servers must name a server" in run.output
        heading, first, second, _ = engines(run, "list").splitlines()
        assert heading.split()[:3] == ["name", "type", "lifecycle"]
        assert (first.split()[:3], second.split()[:3]) == (
            ["engine-0", "bigram", "left"],
            ["engine-2", "bigram", "healthy"],
        )
        stop(run)
    assert_nothing_lost(run)


# --- longer: make chaos -----------------------------------------------------------------------------------------------


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_twenty_swaps_of_engines_lose_no_rollouts(tmp_path):
    directory = tmp_path / "run"
    with launched(new_run(directory, *LONG), directory) as run:
        until_serving(run, "engine-0")
        swap_to_and_fro(run, ["torch"], times=20)
        stop(run)
    assert_nothing_lost(run)


@pytest.mark.chaos
@pytest.mark.timeout(7200)
def test_hundred_engine_kills_lose_no_rollouts_and_stall_at_most_15_seconds(tmp_path):
    directory = tmp_path / "run"
    with launched(new_run(directory, *LONG, "engine.count=2"), directory) as run:
        until_serving(run, "engine-0", "engine-1")
        kill_again_and_again(run, ["engine-0", "engine-1"], times=100)
        stop(run)
    assert_nothing_lost(run)
    print(f"100 kills: the longest time between two steps was {longest_stall_s(run):.1f} s")
    assert longest_stall_s(run) <= 15.0
