"""A small fleet of mock engines, with everything else a run has, in the processes that the benchmark starts."""

from __future__ import annotations

import pytest

from benchmarks import scale
from benchmarks.mock_engine import Pace


@pytest.mark.slow
def test_orders_are_dispatched_announcements_heard_and_nothing_is_lost_when_engines_die(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scale, "_DYING_A_MINUTE", 30.0)
    times = scale._Times(pace=Pace(median_s=0.3, spread=0.3, full=0.01), warm_s=0.5, window_s=2.0, dying_s=1.0)
    at_rest = scale._fleet(6, times)
    assert at_rest["rollouts_per_s"] > 0 and at_rest["dispatch_ms"]["orders"] > 0
    assert at_rest["dispatch_ms"]["never"] == 0, "every order reached an engine"
    assert all(len(at_rest["announcement"][f"{arm}_p99_ms"]) == 9 for arm in ("empty", "requests", "stream", "taken"))
    deaths = scale._fleet(6, times, dying=True)["deaths"]
    assert (deaths["died"], deaths["lost"], deaths["fates"]["failed"], deaths["fates"]["stale"]) == (3, 0, 0, 0)
    assert deaths["fates"]["trained"] >= deaths["orders"]
