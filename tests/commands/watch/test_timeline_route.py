"""`/api/timeline`: a window of the run as lanes; what is no window is refused."""

from __future__ import annotations

from pathlib import Path

from tests.commands.watch.run_files import loaded, served_page, written_run


def test_a_window_is_told_as_lanes(tmp_path: Path) -> None:
    with served_page(written_run(tmp_path / "run", steps=10)) as page:
        loaded(page)
        whole = page.get("/api/timeline")
        assert {"trainer", "publication"} <= {lane["lane"] for lane in whole["lanes"]}
        steps = next(lane for lane in whole["lanes"] if lane["kind"] == "trainer")["tracks"][0]
        assert steps["kind"] == "step" and steps["value"] == list(range(1, 11))
        part = page.get("/api/timeline", **{"from": 4.0, "to": 6.0, "points": 100})
        assert (part["from"], part["to"]) == (4.0, 6.0) and part["resolution"] == 0.02
        for wrong in ("from=nan", "to=-1", "points=1", "from=x"):
            assert page.http.get(f"/api/timeline?{wrong}").status_code == 422
