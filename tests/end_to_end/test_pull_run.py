"""A real run whose engines pull weights equals a run with broadcasts bit for bit, also after a server is killed.

In lockstep, and with policy ratios to recomputed log-probs, the results of a run on a CPU depend only on its
seed, so the transport of the weights must make no difference.
"""

import pytest

from tests.fakes.live_run import launched, new_run

STEPS = 12
LOCKSTEP = (f"run.steps={STEPS}", "staleness.j=1", "staleness.k=1", "objective.grad1.over=old")

Curve = dict[int, tuple[float, ...]]


def curve(run):
    """Return the metrics of each step."""
    measures = ("reward", "loss", "grad_norm", "entropy", "tokens", "sampled_tokens")
    return {event["step"]: tuple(event[name] for name in measures) for event in run.events("step")}


@pytest.mark.chaos
@pytest.mark.parametrize("shards", [1, 2])
def test_run_with_pulled_weights_equals_a_broadcast_run_despite_a_killed_server(tmp_path, shards):
    with launched(new_run(tmp_path / "broadcast", *LOCKSTEP), tmp_path / "broadcast") as run:
        assert run.end() == 0, run.story()
        expected = curve(run)
    assert list(expected) == list(range(1, STEPS + 1))

    pulled = (*LOCKSTEP, "weights.transport=pull", "engine.count=2", f"parameter_server.shards={shards}")
    with launched(new_run(tmp_path / "pull", *pulled), tmp_path / "pull") as run:
        run.until_step(4)
        run.role("parameter-server-0").kill()
        assert run.end() == 0, run.story()
        assert curve(run) == expected
        failures = [event["failed"] for event in run.events("publish") if event["failed"]]
        assert not failures, "the publication waited for the server's next life"
        assert "parameter-server-0" in run.output, "the launcher reported the death"
