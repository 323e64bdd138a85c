"""Measure how fast a browser draws the live page of a long run, and the frame rate while zooming.

The run has 10⁵ steps (a tenth with --quick). `pipelinerl watch` serves it as a process, and Debian's chromium opens it
without a display. Every frame gets a wheel event, which zooms in and out in alternation. Times of frames are taken with
`requestAnimationFrame`, both on the charts over the steps and on the timeline.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.measure import Row, report
from pipelinerl.config import recipe as recipes
from pipelinerl.observability.events import EventLog
from pipelinerl.rng import generator

_DEADLINE_MS: Final = 600_000
_FRAMES: Final = 240
_TARGET_FPS: Final = 30.0
_TARGET_S: Final = 2.0

#: Script that sends wheel events to an element, one per frame, and returns the milliseconds of each frame.
_ZOOMING: Final = """([selector, frames, ctrlKey]) => new Promise((done) => {
  const element = document.querySelector(selector);
  const box = element.getBoundingClientRect();
  const times = [];
  const place = { clientX: box.x + box.width * 0.6, clientY: box.y + box.height / 2, bubbles: true, cancelable: true };
  const frame = (now) => {
    times.push(now);
    if (times.length > frames) return done(times.slice(1).map((each, at) => each - times[at]));
    const deltaY = times.length % 80 < 40 ? -60 : 60;
    element.dispatchEvent(new WheelEvent("wheel", { ...place, deltaY, ctrlKey }));
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
})"""


def run(quick: bool = False) -> None:
    """Run the benchmark, print its table and, unless `quick`, write its record."""
    steps = 10_000 if quick else 100_000
    with tempfile.TemporaryDirectory(prefix="pipelinerl-watch-") as folder:
        run_dir = _long_run(Path(folder), steps)
        with _served(run_dir) as link:
            figures = _measured(link)
    opened, charts, timeline = (figures[name] for name in ("opened_s", "charts_fps", "timeline_fps"))
    rows = [
        Row("opened until its charts are drawn [s]", opened, f"<= {_TARGET_S}", opened <= _TARGET_S),
        Row("charts, zoomed [frames/s]", charts, f">= {_TARGET_FPS}", charts >= _TARGET_FPS),
        Row("timeline, zoomed [frames/s]", timeline, f">= {_TARGET_FPS}", timeline >= _TARGET_FPS),
    ]
    record = {"steps": steps, "target_fps": _TARGET_FPS, **figures}
    report("watch_browser", rows, record, quick=quick, title=f"the page of {steps:,} steps in a browser")


@contextmanager
def _served(run_dir: Path) -> Iterator[str]:
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


def _long_run(folder: Path, steps: int) -> Path:
    run_dir = folder / "long"
    run_dir.mkdir()
    recipes.save(recipes.load("tiny"), run_dir / "recipe.toml")
    recipes.write_layout(run_dir)
    noise = generator(0, "watch-browser").random(steps + 1).tolist()
    with EventLog(run_dir / "events.jsonl") as log:
        log.write("run_started", elapsed_s=0.0, run="long", total_steps=steps)
        log.write("engine_joined", elapsed_s=0.1, url="http://127.0.0.1:4001")
        for step in range(1, steps + 1):
            at, value = float(step), noise[step]
            domain = {"rollouts": 32.0, "groups": 4.0, "reward": value, "accuracy": value, "length_mean": 200 * value}
            log.write(
                "step", elapsed_s=at, step=step, model_version=step, rollouts=64.0, reward=value, entropy=value,
                grad_norm=value, loss=value, learning_rate=1e-3, staleness_mean=value, staleness_max=3.0, step_s=0.7,
                wait_s=0.2, sampled_tokens=12800.0, clip_fraction=0.1 * value, ess=1 - 0.1 * value,
                by_domain={"short": domain, "long": domain},
            )  # fmt: skip
            log.write(
                "publish", elapsed_s=at + 0.1, model_version=step, pause_s=0.01, total_s=0.1, engines=1, failed={}
            )
    return run_dir


def _measured(link: str) -> dict[str, float]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=options)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(_DEADLINE_MS)
        page.goto(link)
        # Wait until the server has read all events, so that the next page is complete.
        page.wait_for_function(
            "() => fetch('/api/run').then((answer) => answer.json()).then((run) => run.loading.events === 1)"
        )
        began = time.monotonic()
        page.reload()
        page.wait_for_selector(".chart canvas")
        opened_s = time.monotonic() - began
        charts = page.evaluate(_ZOOMING, [".chart canvas", _FRAMES, True])
        page.evaluate("location.hash = '#/timeline'")
        page.wait_for_selector("main canvas[role=img]")
        timeline = page.evaluate(_ZOOMING, ["main canvas[role=img]", _FRAMES, False])
        browser.close()
    charts_fps, timeline_fps = (1e3 / float(np.mean(frames_ms)) for frames_ms in (charts, timeline))
    return {"opened_s": opened_s, "charts_fps": charts_fps, "timeline_fps": timeline_fps}
