"""Real runs with the JAX trainer and a torch engine: they learn as with the torch trainer, and resume after its kill.

In lockstep, and with policy ratios to recomputed log-probs, the results of a run on a CPU depend only on its
seed. A trainer restored from its checkpoint after a kill must therefore repeat the training curve bit for bit.
"""

import numpy as np
import pytest

from tests.fakes.live_run import launched, new_run

STEPS = 8
LOCKSTEP = (
    f"run.steps={STEPS}",
    "checkpoint.interval_steps=4",
    "staleness.j=1",
    "staleness.k=1",
    "objective.grad1.over=old",
    "launch.start_timeout_s=240",
)

Curve = dict[int, tuple[float, ...]]


def curve(run):
    """Return the metrics of each step; if a step was repeated, those of the last repetition."""
    measures = ("reward", "loss", "grad_norm", "entropy", "tokens", "sampled_tokens")
    return {event["step"]: tuple(event[name] for name in measures) for event in run.events("step")}


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_jax_run_matches_a_torch_run_and_repeats_its_training_curve_after_a_kill(tmp_path):
    curves = {}
    for kind in ("torch", "jax"):
        with launched(new_run(tmp_path / kind, *LOCKSTEP, f"trainer.type={kind}"), tmp_path / kind) as run:
            assert run.end() == 0, run.story()
            curves[kind] = curve(run)
    first = (curves["jax"][1], curves["torch"][1])
    np.testing.assert_allclose(*first, rtol=1e-4, atol=1e-6, err_msg="the first step, on the same rollouts")

    with launched(new_run(tmp_path / "killed", *LOCKSTEP, "trainer.type=jax"), tmp_path / "killed") as run:
        run.until_step(5)
        run.role("trainer").kill()
        assert run.end() == 0, run.story()
        assert curve(run) == curves["jax"]
