"""A real run whose learning rate is far too high: its reward collapses, and it returns to a good checkpoint, once."""

from collections import Counter

import pytest

from pipelinerl.observability.run_history import tell
from tests.fakes.live_run import launched, new_run


@pytest.mark.slow
def test_collapsed_run_rewinds_once_and_trains_each_group_exactly_once(tmp_path):
    changes = ("run.steps=60", "optimizer.learning_rate=4e-3", "run.on_collapse=rewind", "checkpoint.interval_steps=5")
    directory = tmp_path / "lost"
    with launched(new_run(directory, *changes), directory) as run:
        assert run.end() == 0, run.output
        (rewind,) = run.events("rewind")
        first, second = run.events("trainer_ready")
        assert first["model_version"] == 0 < second["model_version"] <= rewind["to"] < rewind["step"]
        (changed,) = run.events("knobs")
        assert changed["changes"] == {"learning_rate": pytest.approx(2e-3)}
        history = tell(run.events())
        assert [step["step"] for step in history.steps] == list(range(1, 61))
        orders = Counter(order for step in history.steps for order in step["orders"])
        assert set(orders.values()) == {1}, "no group is in two steps of the history that led to the last weights"
        ledger = (history.finished or {})["ledger"]
        assert ledger["trained"] == len(orders)
        assert ledger["issued"] == sum(ledger[each] for each in ("trained", "filtered", "stale", "failed", "in_flight"))
