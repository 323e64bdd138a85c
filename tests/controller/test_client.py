"""Tests of both clients of the controller's API, with every call against the real application."""

import asyncio
import math

import pytest

from pipelinerl.controller.client import AsyncControllerClient, ControllerClient
from pipelinerl.controller.routes import ActorAssignment
from pipelinerl.controller.service.api import create_api
from pipelinerl.errors import AddressError, RecipeError, TokenRefused
from pipelinerl.system.http_service import listen, serve_until, url_of
from tests.controller.service.test_service import running
from tests.controller.world import ENGINE
from tests.patience import PATIENCE_S

TOKEN = "secret"


@pytest.fixture
async def run(tmp_path):
    async with running(tmp_path) as made:
        yield made


@pytest.fixture
async def url(run):
    over = asyncio.get_running_loop().create_future()
    listener = listen("127.0.0.1", 0)
    address = url_of(*listener.getsockname()[:2])
    serving = asyncio.create_task(serve_until(create_api(run.service, token=TOKEN), listener, over=over))
    yield address
    over.set_result(None)
    await asyncio.wait_for(serving, PATIENCE_S)


async def test_every_call_of_the_blocking_controller_client_works(run, url):
    await run.start()
    with ControllerClient(url, TOKEN, who="ada") as controller:
        fleet = await asyncio.to_thread(controller.engines)
        assert [(engine.url, engine.state) for engine in fleet.engines] == [(ENGINE, "healthy")]
        assert (await asyncio.to_thread(controller.status)).fleet.engines[0].url == ENGINE
        assert (await asyncio.to_thread(controller.change_knobs, {"temperature": 0.5})).effective
        knobs = await asyncio.to_thread(controller.knobs)
        assert knobs.knobs["temperature"] == 0.5
        assert [(change.who, change.changes) for change in knobs.log] == [("ada", {"temperature": 0.5})]
        assert await asyncio.to_thread(controller.request_engines, "torch", count=2) == ("engine-1", "engine-2")
        await asyncio.to_thread(controller.remove_engine, "engine-2")
        assert (await asyncio.to_thread(controller.engines)).to_stop == ("engine-2",)
        await asyncio.to_thread(controller.register_engine, ENGINE)
        with pytest.raises(RecipeError, match="exactly one engine of this run must have that URL or name"):
            await asyncio.to_thread(controller.drain_engine, "http://other/?a&b")
        await asyncio.to_thread(controller.drain_engine, ENGINE)
        assert run.controller.state.fleet.is_draining(ENGINE)
        await asyncio.to_thread(controller.stop)
        assert run.controller.state.stop_reason == "stopped by ada"


async def test_every_call_of_the_async_controller_client_works_or_raises_its_error(run, url):
    async with AsyncControllerClient(url, TOKEN) as controller:
        await controller.register_engine(ENGINE, incarnation="1", name="engine-0", type="torch")
        assignment = await controller.assignment()
        assert assignment == ActorAssignment(
            serving=(), finishing=(ENGINE,), groups_in_flight=8, model_version=0, k=4.0
        )
        assert assignment.staleness_bound == 4.0
        with pytest.raises(RecipeError, match=r"^url: "):
            await controller.register_engine("http://host/path", incarnation="1", name="", type="")
        with ControllerClient(url, TOKEN) as operator:
            await asyncio.to_thread(operator.change_knobs, {"k": "inf"})
        assert (await controller.assignment()).staleness_bound == math.inf
    async with AsyncControllerClient(url, "another") as stranger:
        with pytest.raises(TokenRefused, match="the bearer token is not the one of this run; use the one in tokens"):
            await stranger.assignment()
    async with AsyncControllerClient("http://127.0.0.1:1", TOKEN) as nobody:
        with pytest.raises(AddressError, match=r"^the controller at http://127\.0\.0\.1:1 does not answer \(.*\)$"):
            await nobody.assignment()
