"""What three open pages cost a live run: windows with them and without, in turn, over one run of `make run`'s recipe.

    open     `pipelinerl watch` serves; three pages hold its stream, and at steps ask what the Now screen asks
    closed   the pages have gone, and the server's process is stopped, as if it were not there

A pair of windows that follow each other gives one ratio. Tokens a second on the clock are what a user sees; where
others use the machine as well windows differ by far more than 1 %, so processor time is told beside it: what the server
took ÷ what the run's processes took meanwhile, which bounds the cost where all cores are busy. The pages are threads of
this process. What they take, in Python, a browser would take on the machine of whoever looks; here it slows the run,
too, and is told apart.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

import psutil

from benchmarks.measure import Interval, Row, bootstrap_median, print_table, write_record
from pipelinerl.observability.events import EventFollower
from pipelinerl.system.http_client import session

_TARGET: Final = 0.01
_PAGES: Final = 3
_WINDOW_S: Final = 10.0
#: A window is longer where the run has not taken so many steps by then.
_STEPS: Final = 5
#: After a change of arms, before a window begins: what the server has missed is read by then.
_SETTLE_S: Final = 2.0
_DEADLINE_S: Final = 600.0
#: A page asks again at most so often, as its script does.
_PAUSE_S: Final = 1.5
_ASKED: Final = ("/api/now?window=20", "/api/steps?metrics=reward,entropy&points=1000", "/api/engines")


@final
@dataclass
class LiveRecipe:
    """The run: its steps as they come, and its processes."""

    launcher: psutil.Process
    log: EventFollower
    steps: list[tuple[float, float]] = field(default_factory=list)
    """(second of the run, tokens sampled for it)"""
    _seen: dict[int, float] = field(default_factory=dict)

    def read(self) -> None:
        """Take in what has come."""
        for event in self.log.new():
            if event["kind"] == "step":
                self.steps.append((float(event["elapsed_s"]), float(event["sampled_tokens"])))

    def processor_s(self) -> float:
        """Seconds that its processes have taken so far; of one that has ended, as last seen."""
        with suppress(psutil.NoSuchProcess):
            for process in (self.launcher, *self.launcher.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    self._seen[process.pid] = sum(process.cpu_times()[:2])
        return sum(self._seen.values())


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens a second, processor seconds of the run, of the server and of this process, and tokens in all."""

    rate: float
    run_s: float
    server_s: float
    pages_s: float
    tokens: float


@final
class OpenPage:
    """A page's stream and questions, on a thread, until `close`."""

    def __init__(self, url: str, cookie: str) -> None:
        self.heard = 0
        self._closed = threading.Event()
        self._url, self._headers = url, {"cookie": cookie}
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up."""
        self._closed.set()
        self._thread.join(_DEADLINE_S)

    def _listen(self) -> None:
        asked_at = 0.0
        with (
            session(self._url, token=None, timeout_s=_DEADLINE_S, headers=self._headers) as http,
            http.stream("GET", "/api/stream") as answer,
        ):
            for line in answer.iter_lines():
                if self._closed.is_set():
                    return
                if line != "event: step":
                    continue
                self.heard += 1
                if time.monotonic() - asked_at >= _PAUSE_S:
                    asked_at = time.monotonic()
                    for path in _ASKED:
                        http.get(path).raise_for_status()


@contextmanager
def _live(folder: Path) -> Iterator[LiveRecipe]:
    """`make run`'s recipe, from its twentieth step on, without an end and without an evaluation in between."""
    run_dir = folder / "watched"
    overrides = [
        "run.steps=1000000",
        "run.name=watched",
        f"run.directory={folder}",
        "evaluation.interval_steps=1000000",
    ]
    command = [sys.executable, "-m", "pipelinerl.cli", "run", "tiny", *overrides]
    with (folder / "run.out").open("w") as out:
        launcher = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        run = LiveRecipe(psutil.Process(launcher.pid), EventFollower(run_dir / "events.jsonl"))
        deadline = time.monotonic() + _DEADLINE_S
        while len(run.steps) < 20:
            if launcher.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the run has not come to step 20:\n{(folder / 'run.out').read_text()[-2000:]}")
            time.sleep(0.5)
            run.read()
        yield run
    finally:
        launcher.send_signal(signal.SIGTERM)
        try:
            launcher.wait(120)
        except subprocess.TimeoutExpired:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()


@final
@dataclass
class Watching:
    """The server, which stands still while nobody looks, and the pages that are open."""

    server: psutil.Process
    url: str
    cookie: str
    pages: list[OpenPage] = field(default_factory=list)

    def open(self) -> None:
        """Let it go on, and open the pages."""
        self.server.send_signal(signal.SIGCONT)
        self.pages = [OpenPage(self.url, self.cookie) for _ in range(_PAGES)]

    def close(self) -> None:
        """Close the pages, and have it stand still."""
        for page in self.pages:
            page.close()
        self.pages = []
        self.server.send_signal(signal.SIGSTOP)

    def processor_s(self) -> float:
        """Seconds of the server."""
        return sum(self.server.cpu_times()[:2])


@contextmanager
def _watching(run_dir: Path) -> Iterator[Watching]:
    command = [sys.executable, "-u", "-m", "pipelinerl.cli", "watch", str(run_dir)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"(http://[^/]+)(/\S+)", process.stdout.readline())
        assert found is not None, "pipelinerl watch has printed no link"
        with session(found[1], token=None, timeout_s=60.0) as http:
            cookie = http.get(found[2], follow_redirects=False).headers["set-cookie"].partition(";")[0]
        watching = Watching(psutil.Process(process.pid), found[1], cookie)
        watching.close()
        yield watching
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()


def _window(run: LiveRecipe, watching: Watching) -> Window:
    """Measure from now on, from a step to the last one within the window."""
    time.sleep(_SETTLE_S)
    run.read()
    first, run_s, server_s, pages_s = len(run.steps) - 1, run.processor_s(), watching.processor_s(), time.process_time()
    began = time.monotonic()
    while time.monotonic() - began < _WINDOW_S or len(run.steps) - first <= _STEPS:
        if time.monotonic() - began > _DEADLINE_S:
            raise RuntimeError(f"the run took fewer than {_STEPS} steps in {_DEADLINE_S:g} s")
        time.sleep(0.25)
        run.read()
    taken = run.steps[first:]
    tokens = sum(count for _, count in taken[1:])
    return Window(
        rate=tokens / (taken[-1][0] - taken[0][0]),
        run_s=run.processor_s() - run_s,
        server_s=watching.processor_s() - server_s,
        pages_s=time.process_time() - pages_s,
        tokens=tokens,
    )


def _measured(run: LiveRecipe, watching: Watching, pairs: int) -> tuple[list[tuple[Window, Window]], int]:
    """(with pages, without) by pair, the order changing from pair to pair; and the steps that pages were told."""
    windows, heard = list[tuple[Window, Window]](), 0
    for number in range(pairs):
        found: dict[str, Window] = {}
        for arm in ("open", "closed") if number % 2 else ("closed", "open"):
            if arm == "open":
                watching.open()
            found[arm] = _window(run, watching)
            if arm == "open":
                heard += sum(page.heard for page in watching.pages)
                watching.close()
        windows.append((found["open"], found["closed"]))
    return windows, heard


def _figures(windows: list[tuple[Window, Window]]) -> dict[str, Interval]:
    return {
        "rate": bootstrap_median([with_pages.rate / without.rate for with_pages, without in windows]),
        "share": bootstrap_median([with_pages.server_s / with_pages.run_s for with_pages, _ in windows]),
        "pages": bootstrap_median([with_pages.pages_s / with_pages.run_s for with_pages, _ in windows]),
        "run_per_token": bootstrap_median([(a.run_s / a.tokens) / (b.run_s / b.tokens) for a, b in windows]),
    }


def run(quick: bool) -> None:
    """Measure, print the table and write the record."""
    pairs = 8 if quick else 30
    with (
        tempfile.TemporaryDirectory(prefix="pipelinerl-watch-cost-") as name,
        _live(Path(name)) as live,
        _watching(Path(name) / "watched") as watching,
    ):
        windows, heard = _measured(live, watching, pairs)
    figures = _figures(windows)
    rate, share = figures["rate"], figures["share"]
    rows = [
        Row("tokens/s with 3 pages / without", rate, f">= {1 - _TARGET}", rate.median >= 1 - _TARGET),
        Row("processor time of the server / of the run", share, f"<= {_TARGET}", share.median <= _TARGET),
        Row("processor time of three pages in Python / of the run", figures["pages"]),
        Row("the run's processor time per token, with / without", figures["run_per_token"]),
        Row("steps that the pages were told", heard, "> 0", heard > 0),
    ]
    print_table(f"three open pages, {pairs} pairs of windows of {_WINDOW_S:g} s", rows)
    record: dict[str, Any] = {each: interval.as_dict() for each, interval in figures.items()}
    rates = {"open": [a.rate for a, _ in windows], "closed": [b.rate for _, b in windows]}
    write_record("watch_cost", {"quick": quick, "pairs": pairs, "target": _TARGET, "heard": heard, **record, **rates})
