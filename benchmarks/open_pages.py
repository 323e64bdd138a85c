"""`pipelinerl watch` as a process, and pages that are open in it: they ask what the page's script asks, when it does.

A page here shows the Now screen and is looked at. It asks `/api/run`, then `/api/now` with the rows of all steps; at
what its stream tells, `/api/now` again for the newer rows, at most every 1.5 s, and `/api/run` every 15 s
(`static/now.js`, `static/app.js`; `tests/observability/page/test_browser.py` holds a browser's requests against these).
A page that is hidden hangs up and asks nothing. What is left out is drawing, and the question that a browser asks a
quarter of a second late where nothing more is told: here it is asked at what is told next.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final
from urllib.parse import urlsplit

import httpx

from pipelinerl.system.http_client import session

_DEADLINE_S: Final = 600.0
#: As `Now` has it, `Page`, and `useAnswer`, in seconds.
_NOW_S: Final = 1.5
_RUN_S: Final = 15.0
_SLACK_S: Final = 0.25
_TOGETHER_S: Final = 0.03
_ROWS: Final = 1000
_NEWER: Final = 250
#: What the screen's charts show of every run, in their order.
_CHARTED: Final = (
    "reward", "accuracy", "staleness_mean", "staleness_max", "entropy", "grad_norm", "loss", "step_s", "wait_s",
    "sampled_tokens", "tokens", "clip_fraction", "ess", "mismatch_numerics_p95", "mismatch_staleness_p95",
    "mismatch_cache_p95", "learning_rate",
)  # fmt: skip


def run_question(run: int = 0) -> tuple[str, dict[str, str]]:
    """Path and query of what the page's frame asks."""
    return "/api/run", {"run": str(run)}


def now_question(facts: Mapping[str, Any], rows: Mapping[str, Any] | None = None) -> tuple[str, dict[str, str]]:
    """Path and query of what the Now screen asks, of a run of these facts, by a page that holds these rows."""
    domains = [f"domain/{name}/{figure}" for name in facts["domains"][:8] for figure in ("accuracy", "reward")]
    known = set(facts["metrics"])
    metrics = [name for name in (*_CHARTED, *domains) if name in known]
    query = {"run": str(facts["run"]), "window": "20", "metrics": ",".join(metrics) or "reward", "points": str(_ROWS)}
    if rows is not None and rows["count"]:
        query |= {"since": str(rows["last"]), "marked": str(rows["marked"])}
    return "/api/now", query


@final
class OpenPage:
    """A page's stream and questions, on a thread, until `close`."""

    def __init__(self, url: str, cookie: str) -> None:
        self.heard = 0
        self.asked = 0
        self._closed = threading.Event()
        self._url, self._headers = url, {"cookie": cookie}
        self._rows: dict[str, Any] | None = None
        self._held = 0
        self._facts: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._show, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up."""
        self._closed.set()
        self._thread.join(_DEADLINE_S)

    def _show(self) -> None:
        with session(self._url, token=None, timeout_s=_DEADLINE_S, headers=self._headers) as http:
            self._ask_run(http)
            now_at = run_at = time.monotonic()
            self._ask_now(http)
            with http.stream("GET", "/api/stream") as answer:
                for frames in _frames(answer):
                    if self._closed.is_set():
                        return
                    self.heard += frames.count(b"event: step\n")
                    if time.monotonic() - now_at >= _NOW_S - _SLACK_S:
                        time.sleep(_TOGETHER_S)
                        now_at = time.monotonic()
                        self._ask_now(http)
                    if time.monotonic() - run_at >= _RUN_S - _SLACK_S:
                        run_at = time.monotonic()
                        self._ask_run(http)

    def _ask_run(self, http: httpx.Client) -> None:
        self._facts = self._ask(http, *run_question())

    def _ask_now(self, http: httpx.Client) -> None:
        held = self._rows if self._held < _ROWS + _NEWER else None
        self._rows = self._ask(http, *now_question(self._facts, held))["steps"]
        self._held = len(self._rows["x"]["step"]) + (self._held if held is not None else 0)
        if self._rows["figures"] != len(self._facts["metrics"]):
            self._ask_run(http)
            self._rows = None

    def _ask(self, http: httpx.Client, path: str, query: Mapping[str, str]) -> Any:
        self.asked += 1
        return json.loads(http.get(path, params=query).raise_for_status().content)


def _frames(answer: httpx.Response) -> Iterator[bytes]:
    """The bytes of a stream of events as they come, cut where an event ends."""
    rest = b""
    for piece in answer.iter_raw():
        whole, end, rest = (rest + piece).rpartition(b"\n\n")
        if end:
            yield whole + end


@final
@dataclass
class PageServer:
    """The process that serves, and the pages that are open."""

    pid: int
    url: str
    cookie: str
    pages: Sequence[OpenPage] = ()
    closed: list[OpenPage] = field(default_factory=list)

    def open(self, count: int) -> None:
        """Open so many pages."""
        self.pages = [OpenPage(self.url, self.cookie) for _ in range(count)]

    def pause(self) -> None:
        """Have it stand still, as if it were not there."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Close them."""
        for page in self.pages:
            page.close()
        self.closed += self.pages
        self.pages = ()

    @property
    def heard(self) -> int:
        """Steps that all pages were told."""
        return sum(page.heard for page in (*self.closed, *self.pages))

    @property
    def asked(self) -> int:
        """Questions that all pages have asked."""
        return sum(page.asked for page in (*self.closed, *self.pages))

    def processor_s(self) -> float:
        """Seconds of the server so far, by its processor clock (clock_getcpuclockid), which is finer than ticks."""
        return time.clock_gettime((~self.pid << 3) | 2)


@contextmanager
def served(run_dir: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`pipelinerl watch` of a run, in a process of its own, and the link that it prints."""
    command = [sys.executable, "-u", "-m", "pipelinerl.cli", "watch", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None, "pipelinerl watch has printed no link"
            yield process, found[0]
        finally:
            process.send_signal(signal.SIGCONT)  # who measures may have stopped it
            process.terminate()
            process.wait(60)


@contextmanager
def page_server(run_dir: Path) -> Iterator[PageServer]:
    """`pipelinerl watch` of a run, and the cookie that its link gives."""
    with served(run_dir) as (process, link):
        parts = urlsplit(link)
        base = f"{parts.scheme}://{parts.netloc}"
        with session(base, token=None, timeout_s=60.0) as http:
            path = link.removeprefix(base)
            cookie = http.get(path, follow_redirects=False).headers["set-cookie"].partition(";")[0]
        server = PageServer(process.pid, base, cookie)
        yield server
        server.close()
