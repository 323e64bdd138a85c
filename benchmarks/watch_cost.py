"""What three open pages cost a live run: windows with them and without, in turn, over one run of `make run`'s recipe.

    open     `pipelinerl watch` serves; three pages hold its stream, and ask what the Now screen asks
    closed   the pages have gone, and the server's process is stopped, as if it were not there
    still    the same as `closed` once more

A round is one window of each, in an order that changes from round to round; its ratios are `open` ÷ `closed`, and
`still` ÷ `closed`, which tells what the measurement itself makes of nothing at all. The run has taken 400 steps before:
its answers change their length no more. Tokens a second on the clock are what a user sees; where others use the machine
as well windows differ by far more than 1 %, so processor time is told beside it: what the server took ÷ what the run's
processes took meanwhile, which bounds the cost where all cores are busy. The pages are threads of this process. What
they take, in Python, a browser would take on the machine of whoever looks; here it slows the run, too, and is told
apart. `watch_server` tells what the server takes whatever else the machine does.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.live_recipe import LiveRecipe, live_recipe
from benchmarks.measure import Interval, Row, bootstrap_median, print_table, write_record
from benchmarks.open_pages import PageServer, page_server

_TARGET: Final = 0.01
_PAGES: Final = 3
_WINDOW_S: Final = 10.0
#: A window is longer where the run has not taken so many steps by then.
_STEPS: Final = 5
#: After a change of arms, before a window begins: what the server has missed is read by then.
_SETTLE_S: Final = 2.0
#: Before the first window.
_LEARNED: Final = 400
_ARMS: Final = ("open", "closed", "still")
_DEADLINE_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens a second, processor seconds of the run, of the server and of this process, and tokens in all."""

    rate: float
    run_s: float
    server_s: float
    pages_s: float
    tokens: float


def _window(run: LiveRecipe, server: PageServer) -> Window:
    """Measure from now on, from a step to the last one within the window."""
    time.sleep(_SETTLE_S)
    run.read()
    first, run_s, server_s, pages_s = len(run.steps) - 1, run.processor_s(), server.processor_s(), time.process_time()
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
        server_s=server.processor_s() - server_s,
        pages_s=time.process_time() - pages_s,
        tokens=tokens,
    )


def _measured(run: LiveRecipe, server: PageServer, rounds: int) -> list[dict[str, Window]]:
    """One window of each arm by round, each arm first, second and third equally often."""
    windows = list[dict[str, Window]]()
    for number in range(rounds):
        found: dict[str, Window] = {}
        order = _ARMS[number % 3 :] + _ARMS[: number % 3]
        for arm in order if number // 3 % 2 else order[::-1]:
            if arm == "open":
                server.resume()
                server.open(_PAGES)
            found[arm] = _window(run, server)
            if arm == "open":
                server.close()
                server.pause()
        windows.append(found)
    return windows


def _figures(windows: list[dict[str, Window]]) -> dict[str, Interval]:
    opened, closed, still = ([found[arm] for found in windows] for arm in _ARMS)
    pairs, nothing = list(zip(opened, closed, strict=True)), list(zip(still, closed, strict=True))
    return {
        "rate": bootstrap_median([a.rate / b.rate for a, b in pairs]),
        "rate_of_nothing": bootstrap_median([a.rate / b.rate for a, b in nothing]),
        "share": bootstrap_median([each.server_s / each.run_s for each in opened]),
        "pages": bootstrap_median([each.pages_s / each.run_s for each in opened]),
        "run_per_token": bootstrap_median([(a.run_s / a.tokens) / (b.run_s / b.tokens) for a, b in pairs]),
        "run_per_token_of_nothing": bootstrap_median([(a.run_s / a.tokens) / (b.run_s / b.tokens) for a, b in nothing]),
    }


def run(quick: bool) -> None:
    """Measure, print the table and write the record."""
    rounds = 6 if quick else 24
    with (
        tempfile.TemporaryDirectory(prefix="pipelinerl-watch-cost-") as name,
        live_recipe(Path(name), learned=_LEARNED) as live,
        page_server(Path(name) / "watched") as server,
    ):
        server.pause()
        windows = _measured(live, server, rounds)
        heard = server.heard
    figures = _figures(windows)
    rate, share = figures["rate"], figures["share"]
    rows = [
        Row("tokens/s with 3 pages / without", rate, f">= {1 - _TARGET}", rate.median >= 1 - _TARGET),
        Row("tokens/s without / without", figures["rate_of_nothing"]),
        Row("processor time of the server / of the run", share, f"<= {_TARGET}", share.median <= _TARGET),
        Row("processor time of three pages in Python / of the run", figures["pages"]),
        Row("the run's processor time per token, with / without", figures["run_per_token"]),
        Row("the run's processor time per token, without / without", figures["run_per_token_of_nothing"]),
        Row("steps that the pages were told", heard, "> 0", heard > 0),
    ]
    print_table(f"three open pages, {rounds} rounds of windows of {_WINDOW_S:g} s", rows)
    record: dict[str, Any] = {each: interval.as_dict() for each, interval in figures.items()}
    rates = {arm: [found[arm].rate for found in windows] for arm in _ARMS}
    write_record("watch_cost", {"quick": quick, "rounds": rounds, "target": _TARGET, "heard": heard, **record, **rates})
