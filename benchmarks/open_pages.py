"""`pipelinerl watch` as a process, and the requests that its Now screen sends.

`tests/observability/page/test_browser.py` compares these requests with a browser's.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

_ROWS: Final = 1000
#: Figures that the screen charts for every run, in their order.
_CHARTED: Final = (
    "reward", "accuracy", "staleness_mean", "staleness_max", "entropy", "grad_norm", "loss", "step_s", "wait_s",
    "sampled_tokens", "tokens", "clip_fraction", "ess", "mismatch_numerics_p95", "mismatch_staleness_p95",
    "mismatch_cache_p95", "learning_rate",
)  # fmt: skip


def run_question(run: int = 0) -> tuple[str, dict[str, str]]:
    """Return path and query of the page's request for the run's facts."""
    return "/api/run", {"run": str(run)}


def now_question(facts: Mapping[str, Any], rows: Mapping[str, Any] | None = None) -> tuple[str, dict[str, str]]:
    """Return path and query of the Now screen's request, for a run of these facts and a page that holds these rows."""
    domains = [f"domain/{name}/{figure}" for name in facts["domains"][:8] for figure in ("accuracy", "reward")]
    known = set(facts["metrics"])
    metrics = [name for name in (*_CHARTED, *domains) if name in known]
    query = {"run": str(facts["run"]), "window": "20", "metrics": ",".join(metrics) or "reward", "points": str(_ROWS)}
    if rows is not None and rows["count"]:
        query |= {"since": str(rows["last"]), "marked": str(rows["marked"])}
    return "/api/now", query


@contextmanager
def served(run_dir: Path) -> Iterator[str]:
    """Start `pipelinerl watch` of a run and yield the link that it prints."""
    command = [sys.executable, "-u", "-m", "pipelinerl.cli", "watch", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            link = re.search(r"http://\S+", process.stdout.readline())
            assert link is not None, "pipelinerl watch printed no link"
            yield link[0]
        finally:
            process.terminate()
            process.wait(60)
