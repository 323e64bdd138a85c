"""Runs that must equal another run bit for bit: with pulled weights, and after a kill of the JAX trainer.

In lockstep, and with policy ratios to recomputed log-probs, the results of a run on a CPU depend only on its seed.
"""

import numpy as np
import pytest

from tests.fakes.live_run import launched, new_run
from tests.fakes.undisturbed import LOCKSTEP, curve, undisturbed


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_jax_run_matches_a_torch_run_and_repeats_its_training_curve_after_a_kill(tmp_path):
    settings = (*LOCKSTEP, "launch.start_timeout_s=240", "trainer.type=jax")
    with launched(new_run(tmp_path / "jax", *settings), tmp_path / "jax") as run:
        assert run.end() == 0, run.story()
        expected = curve(run)
    first = (expected[1], curve(undisturbed())[1])
    np.testing.assert_allclose(*first, rtol=1e-4, atol=1e-6, err_msg="the first step, on the same rollouts")
    with launched(new_run(tmp_path / "killed", *settings), tmp_path / "killed") as run:
        run.until_step(5)
        run.role("trainer").kill()
        assert run.end() == 0, run.story()
        assert curve(run) == expected


@pytest.mark.chaos
@pytest.mark.parametrize("shards", [1, 2])
def test_run_with_pulled_weights_equals_a_broadcast_run_despite_a_killed_server(tmp_path, shards):
    pulled = ("weights.transport=pull", "engine.count=2", f"parameter_server.shards={shards}")
    with launched(new_run(tmp_path / "pull", *LOCKSTEP, *pulled), tmp_path / "pull") as run:
        run.until_step(4)
        run.role("parameter-server-0").kill()
        assert run.end() == 0, run.story()
        assert curve(run) == curve(undisturbed())
        failures = [event["failed"] for event in run.events("publish") if event["failed"]]
        assert not failures, "the publication waited for the server's next life"
        assert "parameter-server-0" in run.output, "the launcher reported the death"
