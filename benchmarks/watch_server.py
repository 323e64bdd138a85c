"""What the page's server takes of the processors for the pages that are open, of a run that keeps a pace.

The run is made up: a log that grows by six steps a second, as `make run`'s does on two cores at rest, each with the
figures, the publication and the samples that go with it, and a controller that answers for its status. So the figure is
the same whatever else the machine does, but for what caches make of it, and two versions can be compared:

    nobody   the server follows the run
    three    three pages of the Now screen are open and looked at

What the run's own processes take of two cores at rest is 2,000 ms a second; 1 % of it is 20.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, final

import msgspec
import uvicorn

from benchmarks.measure import Row, print_table, write_record
from benchmarks.open_pages import PageServer, page_server
from benchmarks.watch import Length, made_group
from pipelinerl.config import recipe as recipes
from pipelinerl.controller.routes import ENGINES
from pipelinerl.observability.events import EventLog
from pipelinerl.observability.status import EngineStatus, FleetStatus, RunStatus
from pipelinerl.rng import generator
from pipelinerl.system.http_service import config_of, listen, url_of

_STEPS_PER_S: Final = 6.0
#: Steps that the run has taken before anybody looks.
_BEFORE: Final = 400
_PAGES: Final = 3
#: After pages were opened.
_SETTLE_S: Final = 4.0
_TARGET_MS: Final = 16.0
#: Figures of a step of `make run`, beside those that charts show.
_FIGURES: Final = 30
_CHARTED: Final = (
    "reward", "accuracy", "staleness_mean", "staleness_max", "entropy", "grad_norm", "loss", "step_s", "wait_s",
    "sampled_tokens", "tokens", "clip_fraction", "ess", "mismatch_numerics_p95", "mismatch_staleness_p95",
    "learning_rate", "length_mean", "truncated",
)  # fmt: skip
_OF_DOMAIN: Final = (
    "groups", "stale_groups", "stale", "length_mean", "length_p95", "truncated", "unjudged", "reward", "accuracy",
    "all_right", "all_wrong", "verified", "verifier_errors",
)  # fmt: skip


@final
class PacedRun:
    """A run that takes a step at its time, on a thread, until `close`; it never computes anything."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir()
        recipes.save(recipes.load("tiny"), run_dir / "recipe.toml")
        recipes.write_layout(run_dir)
        (run_dir / "samples").mkdir()
        self._draw = generator(0, "watch-server")
        self._log = EventLog(run_dir / "events.jsonl")
        self._samples = (run_dir / "samples" / "training-000001.jsonl").open("ab", buffering=0)
        self.steps = 0
        self._log.write("run_started", elapsed_s=0.0, run="paced", total_steps=10**6)
        self._log.write("engine_joined", elapsed_s=0.1, url="http://127.0.0.1:4001")
        for _ in range(_BEFORE):
            self._take_step()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._closed.set()
        self._thread.join()
        self._log.close()
        self._samples.close()

    def _run(self) -> None:
        began, before = time.monotonic(), self.steps
        while not self._closed.wait(max(0.0, began + (self.steps - before + 1) / _STEPS_PER_S - time.monotonic())):
            self._take_step()

    def _take_step(self) -> None:
        self.steps += 1
        at, values = self.steps / _STEPS_PER_S, self._draw.random(64).tolist()
        figures = {name: values[place] for place, name in enumerate(_CHARTED)}
        figures |= {f"figure_{place}": values[place + 18] for place in range(_FIGURES)}
        domain = {name: values[place] for place, name in enumerate(_OF_DOMAIN)} | {"rollouts": 128.0}
        self._log.write(
            "step", elapsed_s=at, step=self.steps, model_version=self.steps, rollouts=256.0, age_1_share=1.0,
            orders=list(range(32 * self.steps, 32 * self.steps + 32)), **figures, stages=[], by_tag={},
            by_domain={"long_words": domain, "short_words": domain},
        )  # fmt: skip
        url = "http://127.0.0.1:4001"
        self._log.write(
            "publish", elapsed_s=at, model_version=self.steps, send_s=0.002, total_s=0.01, pause_s=0.0025,
            pauses_s={url: 0.0025}, engines=1, failed={},
        )  # fmt: skip
        if self.steps % int(_STEPS_PER_S) == 0:
            self._log.write("engines", elapsed_s=at, tokens_per_s=9000.0, occupancy=0.9, running=100, waiting=4)
        length = Length(steps=self.steps, groups=2 * self.steps)
        for number in (2 * self.steps - 2, 2 * self.steps - 1):
            group = made_group(number, length, self._draw.random(8).round(3), "an answer of some words. " * 4)
            self._samples.write(msgspec.json.encode(group) + b"\n")


@contextmanager
def _controller(run_dir: Path) -> Iterator[list[str]]:
    """What answers for a controller; yields the paths that it was asked."""
    engine = EngineStatus(url="http://127.0.0.1:4001", state="healthy", name="engine-0", type="bigram", slots=128)
    status = RunStatus(run="paced", step=1, total_steps=10**6, model_version=1, fleet=FleetStatus(engines=(engine,)))
    asked: list[str] = []

    async def answers(scope: Any, _: Any, send: Any) -> None:
        asked.append(scope["path"])
        body = msgspec.json.encode(status.fleet if scope["path"] == ENGINES else status)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body})

    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(config_of(answers))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    (run_dir / "controller.json").write_text(json.dumps({"url": url_of(*listener.getsockname()), "token": "x"}))
    try:
        yield asked
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def _milliseconds_per_s(server: PageServer, seconds: float) -> float:
    before, began = server.processor_s(), time.monotonic()
    time.sleep(seconds)
    return 1e3 * (server.processor_s() - before) / (time.monotonic() - began)


def run(quick: bool) -> None:
    """Measure, print the table and write the record."""
    seconds = 20.0 if quick else 60.0
    with tempfile.TemporaryDirectory(prefix="pipelinerl-watch-server-") as name:
        run_dir = Path(name) / "paced"
        paced = PacedRun(run_dir)
        try:
            with _controller(run_dir) as controller, page_server(run_dir) as server:
                time.sleep(_SETTLE_S)
                nobody = _milliseconds_per_s(server, seconds)
                server.open(_PAGES)
                time.sleep(_SETTLE_S)
                pages_s, asked, controller_asked = time.process_time(), server.asked, len(controller)
                three = _milliseconds_per_s(server, seconds)
                pages = 1e3 * (time.process_time() - pages_s) / seconds
                asked_per_s = (server.asked - asked) / seconds
                controller_per_s = (len(controller) - controller_asked) / seconds
                server.close()
                heard = server.heard
        finally:
            paced.close()
    rows = [
        Row("server, nobody looks [ms/s]", nobody),
        Row("server, three pages [ms/s]", three, f"<= {_TARGET_MS}", three <= _TARGET_MS),
        Row("three pages, the run and its controller, in Python [ms/s]", pages),
        Row("questions of three pages [1/s]", asked_per_s),
        Row("questions to the controller [1/s]", controller_per_s),
        Row("steps that the pages were told", heard, "> 0", heard > 0),
    ]
    print_table(f"the page's server beside {_STEPS_PER_S:g} steps a second, {seconds:g} s each", rows)
    record = {"nobody_ms_per_s": nobody, "three_ms_per_s": three, "python_ms_per_s": pages, "target_ms": _TARGET_MS}
    rates = {"asked_per_s": asked_per_s, "controller_asked_per_s": controller_per_s, "heard": heard}
    write_record("watch_server", {"quick": quick, "seconds": seconds, **record, **rates})
