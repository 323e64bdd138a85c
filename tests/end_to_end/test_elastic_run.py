"""Engines are added and removed during training, as the run's own measurements require.

This is tested twice: in one process with engine servers on threads, and as a whole run of separate processes.
"""

from __future__ import annotations

import asyncio
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Final, final

import pytest

from pipelinerl.config.sections import ElasticSection
from pipelinerl.controller.state.inputs_and_effects import EngineRegistered, KnobsPatched, StopAsked
from pipelinerl.engines.http.server import create_app
from pipelinerl.engines.options import EngineOptions
from pipelinerl.enums import Elasticity
from pipelinerl.streams.memory_stream import MemoryStream
from tests.end_to_end.test_bigram_run import model_in, new_controller, run
from tests.fakes.live_fleet import assert_nothing_lost, engines, fleet, until_serving, until_steps
from tests.fakes.live_run import CLI, launched, light_run
from tests.fakes.paced_bigram import ENGINE, TRAINER, engine, set_pace
from tests.fakes.served import in_thread
from tests.patience import PATIENCE_S

#: Seconds per decode step and per training step. With SLOW the trainer waits for engines, and with FAST the engines
#: wait for the trainer.
SLOW, FAST = {"decode_s": 0.02, "step_s": 0.0}, {"decode_s": 0.0, "step_s": 0.25}
RULE: Final = ElasticSection(interval_s=0.3, patience=1, settle_s=0.0, waiting=0.5, content=0.4, busy=0.7)


@final
class Site:
    """Starts and stops engines as a controller in this process requests."""

    def __init__(self, model):
        self.options = EngineOptions(model_path=model, model_id="bigram", slots=8, max_waiting=4096, context_length=64)
        self.gone = {}
        """Tokens that each stopped engine had sampled, in the order of stopping."""
        self._up = {}

    def start(self, name):
        """Serve a new engine; return its URL."""
        self._up[name] = serving, made = ExitStack(), engine(self.options)
        return serving.enter_context(in_thread(create_app(made, token=None)))

    def stop(self, name):
        """Stop the engine's server and wait until it has ended."""
        serving, stopped = self._up.pop(name)
        self.gone[name] = stopped.metrics().generated_tokens_total
        serving.close()

    async def follow(self, service, pool):
        """Act once like launcher and actor: start, stop and use engines as the controller requests."""
        seen, fleet = service.status().fleet, service.controller.state.fleet
        pool.update(fleet.serving(), finishing=fleet.finishing())
        for each in seen.requested:
            if each.name not in (*self._up, *seen.to_stop, *self.gone):
                offer = {"incarnation": "1", "name": each.name, "type": each.type}
                url = await asyncio.to_thread(self.start, each.name)
                await service.perform(EngineRegistered(now=await service.now(), url=url, **offer))
        for name in seen.to_stop:
            if name in self._up:
                await asyncio.to_thread(self.stop, name)
        await asyncio.sleep(0.02)


async def _grows_and_shrinks(service, pool, *, site, url):
    """Check that scaling adds a second engine once the limit permits it, and removes an engine when work is scarce.

    At first, scaling is a dry run, which adds no engine. One group fills all slots of an engine, so an engine with
    any work counts as fully busy.
    """
    controller = service.controller
    state = controller.state
    await service.perform(EngineRegistered(now=0.0, url=url, incarnation="1", name="engine-0", type=ENGINE))
    while state.version < 2:
        await site.follow(service, pool)
    changes = {f"engines_max.{ENGINE}": 2}
    await service.perform(KnobsPatched(now=await service.now(), changes=changes, who="me", time=0.0))
    while state.elastic.changed is None:
        await site.follow(service, pool)
    assert not state.engine_requests
    # End the dry run, as a restart with another recipe would.
    controller.settings = replace(controller.settings, elastic=RULE)
    while len(state.fleet.serving()) < 2:
        await site.follow(service, pool)
    reached = state.version
    while state.version < reached + 2:
        await site.follow(service, pool)
    set_pace(site.options.model_path, **FAST)
    while not site.gone:
        await site.follow(service, pool)
    await service.perform(StopAsked(now=await service.now(), reason="seen enough"))
    while True:
        await site.follow(service, pool)


def _scaled(events, kind="engines_scaled"):
    return [(event["from"], event["to"]) for event in events if event["kind"] == kind]


async def test_run_adds_engines_under_load_and_removes_them(tmp_path):
    model = model_in(tmp_path / "model", alphabet="ab")  # small: one of five equally likely tokens is right
    set_pace(model, **SLOW)
    site, made = Site(model), new_controller(steps=100_000)
    made.settings = replace(made.settings, elastic=RULE.model_copy(update={"mode": Elasticity.DRY_RUN}))
    limits = {"engines_min": {ENGINE: 1}, "engines_max": {ENGINE: 1}}
    made.state.knobs = replace(made.state.knobs, learning_rate=1e-9, **limits)
    url = site.start("engine-0")
    learning = {"objective": "pipelinerl", "trainer": {"type": TRAINER}}
    meanwhile = partial(_grows_and_shrinks, site=site, url=url)
    roles = {"controller": made, "stream": MemoryStream()}
    try:
        events = await run(tmp_path, model, url, **roles, learning=learning, meanwhile=meanwhile)
    finally:
        site.stop("engine-0")
    kinds = [event["kind"] for event in events]
    assert kinds.index("knobs") < kinds.index("engines_would_scale") < kinds.index("engines_scaled")
    assert _scaled(events, "engines_would_scale")[0] == (1, 2) and _scaled(events) == [(1, 2), (2, 1)]
    assert [*site.gone] == ["engine-1", "engine-0"], "the newest goes first"
    assert min(site.gone.values()) > 8, "each has sampled more than its proof"
    ledger, orders = made.state.account.ledger(), [order for event in events for order in event.get("orders", ())]
    assert ledger["issued"] == sum(count for outcome, count in ledger.items() if outcome != "issued")
    assert ledger["failed"] == 0 and len(orders) == len(set(orders)) == ledger["trained"]


# --- the same as a run of many processes -----------------------------------------------------------------------------

_LIVE: Final = (
    f"engine.type={ENGINE}", f"trainer.type={TRAINER}", f'elastic.types={{"{ENGINE}" = {{min = 1, max = 2}}}}',
    "elastic.interval_s=1.5", "elastic.patience=1", "elastic.settle_s=0.5", "elastic.waiting=0.5",
    "elastic.content=0.4", "elastic.busy=0.7", "engine.slots=16", "actor.groups_in_flight=16", "staleness.k=8",
    "optimizer.learning_rate=1e-9", "run.steps=100000",
)  # fmt: skip


def _turn(run, limit, number):
    words = [*CLI, "knobs", "set", str(run.directory), f"{limit}.{ENGINE}={number}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr


def _until_gone(run, name):
    run.until(lambda run: fleet(run)[name].state == "left", f"{name} to be drained")


@pytest.mark.slow
def test_live_run_adds_and_removes_engines_and_keeps_its_minimum(tmp_path):
    directory = tmp_path / "run"
    arguments, model = light_run(directory, *_LIVE), tmp_path / "bigram" / "model"
    set_pace(model, **SLOW)
    with launched(arguments, directory) as run:
        until_serving(run, "engine-0", "engine-1")
        _turn(run, "engines_max", 3)
        until_serving(run, "engine-0", "engine-1", "engine-2")
        until_steps(run, 2)
        _turn(run, "engines_min", 2)
        set_pace(model, **FAST)
        _until_gone(run, "engine-2")
        run.role("engine-1").kill()
        run.until(lambda run: fleet(run)["engine-1"].state != "healthy", "engine-1 to be missed")
        until_serving(run, "engine-0", "engine-1")
        until_steps(run, 2)
        _turn(run, "engines_min", 1)
        _until_gone(run, "engine-1")
        until_steps(run, 2)
        subprocess.run([*CLI, "stop", str(directory)], check=True, capture_output=True, timeout=PATIENCE_S)
        assert run.end() == 0, run.story()
        assert _scaled(run.events()) == [(1, 2), (2, 3), (3, 2), (2, 1)]
        assert "1 → 2 engines" in engines(run, "elastic"), "the same figures say the same"
    assert_nothing_lost(run)
    assert not run.alive()
