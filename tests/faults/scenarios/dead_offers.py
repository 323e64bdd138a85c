"""Dead engines, or engines that die at their first join, keep registering: the run keeps its speed and its engines.

Like engines in a crash loop, they register 60 times in 40 s from three addresses, each time with a new incarnation. On
even seeds no process listens there; on odd seeds a process answers polls and hangs up at joins. During a second wave of
registrations, a working engine is added.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Final

from pipelinerl.commands.remote import controller_of
from pipelinerl.controller.routes import ENGINES, EngineTaken
from pipelinerl.errors import RecipeError
from pipelinerl.rng import generator
from pipelinerl.system.machine import free_ports
from tests.fakes.live_fleet import engines, fleet, until_serving
from tests.fakes.live_run import endless_run, launched, output_of
from tests.faults.scenarios.scenario import Verdict

SHORT = range(2)
LONG = range(6)

#: Overrides for a steady speed: with this learning rate the run learns nothing. If it learned, its answers would become
#: equal, and it would slow down.
_STEADY: Final = ("actor.groups_in_flight=8", "staleness.k=8", "optimizer.learning_rate=1e-9")
#: The fraction of the earlier speed that the run must keep, by kind of dead engine. Engines that answer polls cost
#: more, since each attempt to update them forms a new weight group.
_SPEED: Final = {"nobody listens": 0.9, "hangs up": 0.7}
#: An engine that is added to the run must serve after at most this many seconds.
_SERVES_WITHIN_S: Final = 30.0
_ADDRESSES: Final = 3


class _HangsUp(BaseHTTPRequestHandler):
    """An engine that answers polls and closes the connection on other requests."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"pipelinerl_engine_slots 4\n")

    def do_POST(self):
        self.close_connection = True

    def log_message(self, *_): ...


@contextmanager
def _hanging_up():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _HangsUp)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def play(seed, directory, *, offers=60, within_s=40.0):
    """Compare the speed before, during and after `offers` registrations of dead engines; then add a working engine."""
    draw, path, broken = generator(seed, "dead offers"), directory / "run", list[str]()
    with ExitStack() as stack:
        run = stack.enter_context(launched(endless_run(path, *_STEADY), path))
        if seed % 2:
            urls = [stack.enter_context(_hanging_up()) for _ in range(_ADDRESSES)]
        else:
            urls = [f"http://127.0.0.1:{port}" for port in free_ports(_ADDRESSES)]
        gaps_s = draw.dirichlet([4.0] * offers) * within_s

        def storm():
            with controller_of(run.directory) as controller:
                for number, gap_s in enumerate(gaps_s):
                    offer = {"url": urls[number % len(urls)], "incarnation": f"life-{time.monotonic_ns()}"}
                    try:
                        controller._call("POST", ENGINES, EngineTaken, json=offer)
                    except RecipeError as refused:
                        assert "no engine answers there" in str(refused), refused
                    time.sleep(gap_s)

        until_serving(run, "engine-0")
        run.until_step(5)
        before = _speed(run, lambda: time.sleep(within_s / 2))
        during = _speed(run, storm)
        after = _speed(run, lambda: time.sleep(within_s / 2))
        second = Thread(target=storm)
        second.start()
        began = time.monotonic()
        engines(run, "add", "--type", "bigram", "--no-wait")
        until_serving(run, "engine-1")
        serves_s = time.monotonic() - began
        second.join()
        lost = [event for event in run.events("engine_lost") if event["url"] not in urls]
        known = fleet(run)
        broken += [f"{event['url']} was lost, and was well: {event['reason']}" for event in lost]
        broken += [f"{name} is {known[name].state}" for name in ("engine-0", "engine-1") if not known[name].serves]
        output_of("stop", str(path))
        if (status := run.end()) != 0:
            broken.append(f"the run ended with {status}:\n{run.story()}")
    least = _SPEED["hangs up" if seed % 2 else "nobody listens"]
    for name, speed in {"during": during, "after": after}.items():
        if speed < least * before:
            broken.append(f"{speed:.1f} steps/s {name} the offers, {before:.1f} before: expected {least:g} of it")
    if serves_s > _SERVES_WITHIN_S:
        broken.append(f"an engine that was added served after {serves_s:.0f} s, expected {_SERVES_WITHIN_S:g}")
    figures = {
        "dead offers": 2 * offers,
        "engines lost that were well": len(lost),
        "% of the speed during": round(100 * during / before),
        "% after": round(100 * after / before),
        "s until an added engine served": round(serves_s),
    }
    return Verdict(figures, tuple(broken))


def _speed(run, meanwhile):
    began, first = time.monotonic(), max(run.steps())
    meanwhile()
    return (max(run.steps()) - first) / (time.monotonic() - began)
